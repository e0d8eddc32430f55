// What the tests of the layers' kernels share: random operands, results under every order of execution, comparison with
// the CPU twin.
//
// Tolerances. Kernel and twin compute the same fp32 formula and differ by the order of their sums, by fma, and by the
// exponential (exp_gpu). `relative` is what that can amount to in units of the result's own size, `absolute` in units
// of what was summed. A bf16 result may land on the neighbouring value where the two straddle a rounding boundary.
#pragma once
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "dev/tests/simt/memory.h"
#include "dev/tests/simt/sweep.h"
#include "mcf/bf16.h"

template <class X>
std::vector<X> random_normal(size_t n, unsigned seed, float deviation = 1.0f, float mean = 0.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution(mean, deviation);
  std::vector<X> x(n);
  for (X& v : x) store(v, distribution(generator));
  return x;
}

inline std::vector<int> random_ids(size_t n, int limit, unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<int> ids(n);
  for (int& id : ids) id = static_cast<int>(generator() % static_cast<unsigned>(limit));
  return ids;
}

// Everything a kernel wrote, one array after the other, as floats: exact, so equal floats are equal bits.
class Results {
 public:
  template <class X>
  Results& add(const simt::Buffer<X>& buffer) {
    return add(buffer.values());
  }
  template <class X>
  Results& add(const std::vector<X>& values) {
    for (const X& v : values) all_.push_back(to_float(v));
    return *this;
  }
  operator std::vector<float>() const { return all_; }

 private:
  std::vector<float> all_;
};

// run() under every order of execution; it returns Results. They must agree bit for bit.
template <class Run>
std::vector<float> in_every_order(Run run, const std::string& what) {
  std::vector<float> result;
  const std::string order = simt::differing_order([&] { return static_cast<std::vector<float>>(run()); }, &result);
  EXPECT_EQ(order, "") << what << ": other bits than in the first order of execution";
  return result;
}

// Compares a part of the results with the twin's, and moves on behind it.
class Comparison {
 public:
  Comparison(const std::vector<float>& got, std::string what) : got_(got), what_(std::move(what)) {}
  ~Comparison() { EXPECT_EQ(at_, got_.size()) << what_; }

  template <class X>
  void equal(const std::vector<X>& expected, const char* name) {
    near(expected, name, 0, 0, 0);
  }
  // For X = bf16 one step of its grid comes on top, unless both bounds are 0.
  template <class X>
  void near(const std::vector<X>& expected, const char* name, double relative, double absolute) {
    near(expected, name, relative, absolute, std::is_same_v<X, bf16> ? 0x1p-7 : 0.0);
  }

 private:
  template <class X>
  void near(const std::vector<X>& expected, const char* name, double relative, double absolute, double step) {
    size_t wrong = 0;
    for (size_t i = 0; i < expected.size(); i++, at_++) {
      const double want = to_float(expected[i]), got = at_ < got_.size() ? got_[at_] : NAN;
      if (got == want || (std::isnan(got) && std::isnan(want))) continue;
      if (std::fabs(got - want) <= (relative + step) * std::fabs(want) + absolute) continue;
      if (!wrong++) ADD_FAILURE() << what_ << ": " << name << "[" << i << "] is " << got << ", the CPU's is " << want;
    }
    EXPECT_EQ(wrong, 0u) << what_ << ": " << name << ", elements that differ";
  }

  const std::vector<float>& got_;
  std::string what_;
  size_t at_ = 0;
};

template <class X>
std::string type_name() {
  return std::is_same_v<X, bf16> ? "bf16" : "fp32";
}
