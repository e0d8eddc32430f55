// The weights and states of a strategy in host memory, and their change into those of another one.
//
// Full values go through double; each becomes the nearest that the other strategy can hold. What both have is copied
// as it is.
#pragma once
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "mcf/strategies.h"

// "collage_plus", or with a mode that is not --mcf's: "collage_plus:fused".
struct PrecisionName {
  std::string text, precision, mode;
};
// flag: that the text comes from. Throws UsageError.
PrecisionName parse_precision(const char* flag, const std::string& text, const std::string& default_mode);

// Names of element types in safetensors files.
template <class E>
constexpr const char* dtype_name = nullptr;
template <>
inline constexpr const char* dtype_name<bf16> = "BF16";
template <>
inline constexpr const char* dtype_name<float> = "F32";
template <>
inline constexpr const char* dtype_name<double> = "F64";
template <>
inline constexpr const char* dtype_name<int16_t> = "I16";
template <>
inline constexpr const char* dtype_name<int8_t> = "I8";

// Some elements of "theta", the weight that the model sees, or of one of the states.
struct StateArray {
  std::string name, dtype;
  std::vector<char> bytes;
};
// Of a strategy: theta, then its states in their order.
using StateSlice = std::vector<StateArray>;

// What the elements are worth.
struct FullValues {
  std::vector<double> weight, m, v;
};

template <class S>
using Stored = decltype(std::tuple_cat(std::tuple<typename S::Theta>(), typename S::States()));
template <class S>
constexpr bool v_has_low_part = std::tuple_size_v<typename S::States> > S::second_moment + 1;

// Arrays of n elements each, of zeros.
template <class S>
StateSlice empty_slice(size_t n) {
  StateSlice slice;
  const auto add = [&](const char* name, const char* dtype, size_t element) {
    slice.push_back({name, dtype, std::vector<char>(n * element)});
  };
  add("theta", dtype_name<typename S::Theta>, sizeof(typename S::Theta));
  [&]<class... E>(std::tuple<E...>*) {
    size_t i = 0;
    (add(S::state_names[i++], dtype_name<E>, sizeof(E)), ...);
  }(static_cast<typename S::States*>(nullptr));
  return slice;
}

template <class S>
FullValues full_values(const StateSlice& slice) {
  const auto array = [&]<size_t i>() {
    return reinterpret_cast<const std::tuple_element_t<i, Stored<S>>*>(slice[i].bytes.data());
  };
  constexpr size_t v = S::second_moment + 1;
  const size_t n = slice[0].bytes.size() / sizeof(typename S::Theta);
  FullValues full{std::vector<double>(n), std::vector<double>(n), std::vector<double>(n)};
  for (size_t i = 0; i < n; i++) {
    full.weight[i] = S::value(to_float(array.template operator()<0>()[i]), to_float(array.template operator()<1>()[i]));
    full.m[i] = to_float(array.template operator()<v - 1>()[i]);
    full.v[i] = to_float(array.template operator()<v>()[i]);
    if constexpr (v_has_low_part<S>) full.v[i] += to_float(array.template operator()<v + 1>()[i]);
  }
  return full;
}

template <class S>
StateSlice stored_values(const FullValues& full) {
  const size_t n = full.weight.size();
  StateSlice slice = empty_slice<S>(n);
  const auto array = [&]<size_t i>() {
    return reinterpret_cast<std::tuple_element_t<i, Stored<S>>*>(slice[i].bytes.data());
  };
  constexpr size_t v = S::second_moment + 1;
  for (size_t i = 0; i < n; i++) {
    float theta, beside = 0;
    S::set(full.weight[i], theta, beside);
    store(array.template operator()<0>()[i], theta);
    if constexpr (v == 3) store_grid(array.template operator()<1>()[i], beside);
    store(array.template operator()<v - 1>()[i], static_cast<float>(full.m[i]));
    auto& high = array.template operator()<v>()[i];
    store(high, static_cast<float>(full.v[i]));
    if constexpr (v_has_low_part<S>)
      store(array.template operator()<v + 1>()[i], static_cast<float>(full.v[i] - to_float(high)));
  }
  return slice;
}

// How much of the weights, of m and of v was rounded.
struct Changes {
  struct Change {
    double rounded = 0, error = 0, size = 0;  // elements; |new - old|^2; |old|^2
  };
  Change weight, m, v;
  double elements = 0;
};

// The slice of one strategy as one of another; adds to `changes`.
StateSlice convert(const StateSlice& slice, const PrecisionName& from, const PrecisionName& to, Changes& changes);
// empty_slice() of the strategy of that name.
StateSlice empty_slice(const PrecisionName& name, size_t n);
