// An array between guard bytes: what is written just before or behind it makes the test fail.
#pragma once
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "mcf/bf16.h"

template <class T>
class Guarded {
 public:
  // n elements of every byte 0xff: a NaN, so that reading what was never written shows, or -1.
  explicit Guarded(size_t n) : n_(n), bytes_((n + 2 * guard) * sizeof(T), pattern) {
    std::memset(data(), 0xff, n * sizeof(T));
  }
  Guarded(size_t n, float value) : Guarded(n) { fill(value); }
  explicit Guarded(const std::vector<float>& values) : Guarded(values.size()) {
    for (size_t i = 0; i < n_; i++) store(data()[i], values[i]);
  }
  Guarded(const Guarded&) = default;
  ~Guarded() {
    for (size_t i = 0; i < guard * sizeof(T); i++)
      if (bytes_[i] != pattern || bytes_[bytes_.size() - 1 - i] != pattern) {
        ADD_FAILURE() << "guard bytes of an array of " << n_ << " elements were overwritten";
        return;
      }
  }
  T* data() { return reinterpret_cast<T*>(bytes_.data()) + guard; }
  const T* data() const { return reinterpret_cast<const T*>(bytes_.data()) + guard; }
  operator T*() { return data(); }
  operator const T*() const { return data(); }
  size_t size() const { return n_; }
  void fill(float value) {
    for (size_t i = 0; i < n_; i++) store(data()[i], value);
  }
  std::vector<float> floats() const {
    std::vector<float> x(n_);
    for (size_t i = 0; i < n_; i++) x[i] = to_float(data()[i]);
    return x;
  }
  std::string bytes() const { return {reinterpret_cast<const char*>(data()), n_ * sizeof(T)}; }

 private:
  static constexpr size_t guard = 64;  // elements on each side; also keeps data() aligned for vectors
  static constexpr char pattern = 0x5a;
  size_t n_;
  std::vector<char> bytes_;
};
