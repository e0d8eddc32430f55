// vector_math.h: exp and sigmoid against the library, in loops that vectorise and outside of them.
#include "kernels/vector_math.h"

#include <gtest/gtest.h>

#include <vector>

#include "dev/tests/numbers.h"

namespace {

// Error of x against the exact value in units in the last place of fp32.
double ulps(float x, double exact) {
  return std::fabs(x - exact) / std::ldexp(1.0, std::max(std::ilogb(exact), -126) - 23);
}

// One float in 101 of all whose exponential is a normal number, against the library's double exp. 1 ulp is what the
// header promises.
TEST(VectorMath, ExpOverItsRange) {
  double worst = 0;
#pragma omp parallel for reduction(max : worst)
  for (uint32_t u = 0; u < float_bits(88.72f); u += 101)
    for (const float x : {from_bits(u), -from_bits(u)})
      if (x >= -87.33f) worst = std::max(worst, ulps(exp_poly(x), std::exp(static_cast<double>(x))));
  EXPECT_LE(worst, 1);
}

TEST(VectorMath, ExpAtItsEnds) {
  EXPECT_EQ(exp_poly(0.0f), 1.0f);  // the largest logit of a softmax
  EXPECT_EQ(exp_poly(-0.0f), 1.0f);
  EXPECT_EQ(exp_poly(-88.0f), 0.0f);
  EXPECT_EQ(exp_poly(-1e30f), 0.0f);
  EXPECT_EQ(exp_poly(-INFINITY), 0.0f);
  EXPECT_EQ(exp_poly(89.0f), INFINITY);
  EXPECT_EQ(exp_poly(INFINITY), INFINITY);
  EXPECT_TRUE(std::isnan(exp_poly(NAN)));
  EXPECT_LE(ulps(exp_poly(88.7f), std::exp(static_cast<double>(88.7f))), 3);
  EXPECT_LE(ulps(exp_poly(-87.3f), std::exp(static_cast<double>(-87.3f))), 3);
}

TEST(VectorMath, SigmoidOverItsRange) {
  double worst = 0;
  for (int i = -8000; i <= 8000; i++) {
    const float x = static_cast<float>(i) * 0.01f;
    worst = std::max(worst, ulps(sigmoid(x), 1 / (1 + std::exp(-static_cast<double>(x)))));
  }
  EXPECT_LE(worst, 3);  // exp's 1, the sum's and the quotient's half each, and one for the change of binade
  EXPECT_EQ(sigmoid(-1e4f), 0.0f);
  EXPECT_EQ(sigmoid(1e4f), 1.0f);
}

// The same bits in a vectorised loop and one by one: recomputed activations must equal the stored ones.
TEST(VectorMath, LoopsChangeNoBit) {
  constexpr size_t n = 1003;
  std::vector<float> x(n), y(n);
  for (size_t i = 0; i < n; i++) x[i] = static_cast<float>(30 * normal(i));
#pragma omp simd
  for (size_t i = 0; i < n; i++) y[i] = exp_poly(x[i]);
  for (size_t i = 0; i < n; i++) {
    const volatile float one = x[i];
    ASSERT_TRUE(same_bits(y[i], exp_poly(one))) << x[i];
  }
}

}  // namespace
