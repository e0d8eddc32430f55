// expansion.h: exactness of the error-free transforms over all significands, the ranges that they state, and the bounds
// of grow and mul.
//
// Exactness is checked in double, which holds every product of two bf16 numbers, and sums up to an exponent gap of 44.
#include "mcf/expansion.h"

#include <gtest/gtest.h>

#include "dev/tests/numbers.h"
#include "mcf/strategies.h"

namespace {

// The transforms as the paper writes them, every operation rounded to bf16.
void rounded_fast_two_sum(float a, float b, float& s, float& e) {
  s = rn(a + b);
  e = rn(b - rn(s - a));
}
void rounded_two_sum(float a, float b, float& s, float& e) {
  s = rn(a + b);
  const float t = rn(s - a);
  e = rn(rn(a - rn(s - t)) + rn(b - t));
}

// bf16 number of a biased exponent (0: subnormal), significand bits and sign bit.
float number(int exponent, int significand, int sign) {
  return from_bf16(static_cast<uint32_t>(sign << 15 | exponent << 7 | significand));
}

constexpr int significands = 128;

// Whether s + e = a + b exactly and s is the correctly rounded sum, where a and b lie `gap` binades apart.
bool exact_sum(float a, float b, int gap, float s, float e) {
  const double ad = a, bd = b;
  if (gap <= 44) return static_cast<double>(s) + e == ad + bd && s == rn_from_double(ad + bd);
  const bool a_larger = std::fabs(a) > std::fabs(b);  // and the smaller one is far below half an ulp
  return s == (a_larger ? a : b) && e == (a_larger ? b : a);
}

struct SumErrors {
  int64_t cases = 0, two_sum = 0, two_sum_bits = 0, fast = 0, fast_bits = 0;
};

// All significands and signs, at biased exponents `high` and `high - gap`, in both orders. (Beyond a gap of 44, where
// only the sign of the smaller operand can matter, one in 9 of its significands.)
SumErrors check_sums(int high, int gap) {
  SumErrors wrong;
  const int low = high - gap;
  const auto largest = [](float x) { return std::fabs(x) == from_bf16(0x7f7f); };
  for (int i = 0; i < significands; i++)
    for (int j = 0; j<significands; j += gap> 44 ? 9 : 1)
      for (int signs = 0; signs < 4; signs++) {
        const float big = number(high, i, signs & 1), small = number(low, j, signs >> 1);
        if (std::isinf(rn_from_double(static_cast<double>(big) + small))) continue;
        float s, e, rs, re;
        mcf::fast_two_sum(big, small, s, e);
        rounded_fast_two_sum(big, small, rs, re);
        wrong.cases++;
        wrong.fast += !exact_sum(big, small, gap, s, e);
        wrong.fast_bits += !same_bits(s, rs) || !same_bits(e, re);
        if (largest(big) || largest(small)) continue;
        for (const bool swapped : {false, true}) {
          const float a = swapped ? small : big, b = swapped ? big : small;
          mcf::two_sum(a, b, s, e);
          rounded_two_sum(a, b, rs, re);
          wrong.two_sum += !exact_sum(a, b, gap, s, e);
          wrong.two_sum_bits += !same_bits(s, rs) || !same_bits(e, re);
        }
      }
  return wrong;
}

// Every exponent gap there is, with the smaller operand subnormal, the smaller in the lowest normal binade, both around
// 1, and the larger in the top binade.
TEST(Expansion, SumsAreExactAndTheirLeftOutRoundingsChangeNoBit) {
  int64_t cases = 0, two_sum = 0, two_sum_bits = 0, fast = 0, fast_bits = 0;
#pragma omp parallel for schedule(dynamic) reduction(+ : cases, two_sum, two_sum_bits, fast, fast_bits)
  for (int gap = 0; gap <= 254; gap++)
    for (const int high : {gap, gap + 1, 127 + gap / 2, 254}) {
      if (high > 254 || high - gap < 0) continue;
      const SumErrors wrong = check_sums(high, gap);
      cases += wrong.cases;
      two_sum += wrong.two_sum, two_sum_bits += wrong.two_sum_bits;
      fast += wrong.fast, fast_bits += wrong.fast_bits;
    }
  EXPECT_GT(cases, 4 * 45 * 4 * significands * significands * 9 / 10);  // the rest overflows
  EXPECT_EQ(two_sum, 0) << "inexact two_sum";
  EXPECT_EQ(two_sum_bits, 0) << "two_sum differs from the fully rounded one";
  EXPECT_EQ(fast, 0) << "inexact fast_two_sum";
  EXPECT_EQ(fast_bits, 0) << "fast_two_sum differs from the fully rounded one";
}

TEST(Expansion, FastTwoSumOfZeroIsExact) {
  int wrong = 0;
  for (uint32_t b = 0; b < 65536; b++) {
    if ((b & 0x7f80) == 0x7f80) continue;
    for (const float zero : {0.0f, -0.0f}) {
      float s, e;
      mcf::fast_two_sum(zero, from_bf16(b), s, e);
      wrong += s != from_bf16(b) || e != 0;
    }
  }
  EXPECT_EQ(wrong, 0);
}

// Why grow's first sum is two_sum and not fast_two_sum: where the update is larger than the weight, the latter is
// wrong. The shares are counts over all significand pairs, so they are the same everywhere.
TEST(Expansion, FastTwoSumNeedsItsPrecondition) {
  for (const auto& [gap, expected] : {std::pair{1, 0.31}, std::pair{8, 0.9999}}) {
    int wrong = 0, cases = 0;
    for (int i = 0; i < significands; i++)
      for (int j = 0; j < significands; j++)
        for (int signs = 0; signs < 4; signs++) {
          const float a = number(127, i, signs & 1), b = number(127 + gap, j, signs >> 1);
          float s, e;
          rounded_fast_two_sum(a, b, s, e);
          wrong += static_cast<double>(s) + e != static_cast<double>(a) + b;
          cases++;
        }
    EXPECT_NEAR(static_cast<double>(wrong) / cases, expected, 0.005) << "exponent gap " << gap;
  }
}

// The largest finite bf16: with every operation rounded, t overflows for some operands and the error term is NaN.
// Without those roundings two_sum is exact there too.
TEST(Expansion, TwoSumOfTheLargestNumber) {
  int wrong = 0, rounded_nan = 0;
  for (const uint32_t sign : {0u, 0x8000u})
    for (uint32_t upper = 0; upper < 65536; upper++) {
      if ((upper & 0x7f80) == 0x7f80) continue;
      const float a = from_bf16(0x7f7f | sign), b = from_bf16(upper);
      const double ad = a, bd = b;
      const bool tiny = std::fabs(b) < 0x1p84f;  // a gap beyond 44
      if (!tiny && std::isinf(rn_from_double(ad + bd))) continue;
      for (const bool swapped : {false, true}) {
        float s, e;
        mcf::two_sum(swapped ? b : a, swapped ? a : b, s, e);
        wrong += tiny ? s != a || e != b : s != rn_from_double(ad + bd) || e != ad + bd - s;
        rounded_two_sum(swapped ? b : a, swapped ? a : b, s, e);
        rounded_nan += std::isnan(e);
      }
    }
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(rounded_nan, 0);
}

// An overflowing sum or product shows at once in the error term, so non-finite results can't hide in a pair.
TEST(Expansion, OverflowIsVisible) {
  float s, e;
  mcf::two_sum(from_bf16(0x7f7f), from_bf16(0x7f00), s, e);
  EXPECT_TRUE(std::isinf(s) && !std::isfinite(e));
  mcf::two_prod(0x1p70f, 0x1p70f, s, e);
  EXPECT_TRUE(std::isinf(s) && !std::isfinite(e));
}

// Over all significand pairs and signs: the share of products that are not exact, at exponents a and b.
double inexact_products(int exponent_a, int exponent_b) {
  int64_t wrong = 0, cases = 0;
  for (int i = 0; i < significands; i++)
    for (int j = 0; j < significands; j++)
      for (int signs = 0; signs < 4; signs++) {
        const float a = number(exponent_a, i, signs & 1), b = number(exponent_b, j, signs >> 1);
        const double product = static_cast<double>(a) * b;
        if (std::isinf(rn_from_double(product))) continue;
        float p, e;
        mcf::two_prod(a, b, p, e);
        wrong += static_cast<double>(p) + e != product || p != rn_from_double(product) || !same_bits(rn(e), e);
        cases++;
      }
  return cases ? static_cast<double>(wrong) / static_cast<double>(cases) : 0;
}

TEST(Expansion, ProductsAreExactDownToTheStatedExponent) {
  double worst = 0;
#pragma omp parallel for schedule(dynamic) reduction(max : worst)
  for (int sum = -119; sum <= 127; sum++)
    for (const int exponent_a : {sum >= 0 ? 0 : sum / 2, std::max(-126, sum - 127), std::min(127, sum + 126)}) {
      const int exponent_b = sum - exponent_a;
      worst = std::max(worst, inexact_products(exponent_a + 127, exponent_b + 127));
      if (exponent_a == -126) worst = std::max(worst, inexact_products(0, exponent_b + 127));  // subnormal a
    }
  EXPECT_EQ(worst, 0);
  // One binade lower a quarter of the pairs lose bits: the stated range is the whole range.
  EXPECT_NEAR(inexact_products(-60 + 127, -60 + 127), 0.25, 0.02);
  // There the error term is still a bf16 number.
  for (int i = 0; i < significands; i++)
    for (int j = 0; j < significands; j++) {
      float p, e;
      mcf::two_prod(number(127 - 64, i, 0), number(127 - 64, j, 0), p, e);
      ASSERT_TRUE(same_bits(rn(e), e)) << i << " " << j;
    }
}

// The exponent as the preconditions count it.
int exponent_of(float x) { return x == 0 ? -126 : std::max(std::ilogb(x), -126); }

// A random bf16 number: any significand and sign, exponent within +-spread.
float random_number(uint64_t key, uint64_t which, int spread) {
  const uint64_t r = random_bits(key, which);
  const int exponent = 127 - spread + static_cast<int>((r >> 20) % static_cast<uint64_t>(2 * spread + 1));
  return number(exponent, static_cast<int>(r & 127), static_cast<int>(r >> 8 & 1));
}
// A random normalised pair: the low part down to 12 binades below half an ulp of the high part, or 0.
void random_pair(uint64_t key, uint64_t which, int spread, float& x, float& y) {
  const float high = random_number(key, which, spread);
  float low = std::ldexp(random_number(key, which + 1, 6), std::ilogb(high) - 14);
  if (random_bits(key, which + 2) % 16 == 0) low = 0;
  mcf::fast_two_sum(high, low, x, y);
}

// grow: the result is normalised, fast_two_sum's precondition holds, and the one rounding, rn(y + v), costs at most
// 2^-15 of max(|x|, |a|). The bound is nearly reached, so the test would see it broken. The bits are those of the
// formula with every operation rounded, also where a is far larger than x.
TEST(Expansion, GrowIsAccurateToItsBound) {
  constexpr int64_t n = 4'000'000;
  int64_t not_normalised = 0, precondition = 0, other_bits = 0;
  double worst = 0, squares = 0;
#pragma omp parallel for reduction(+ : not_normalised, precondition, other_bits, squares) reduction(max : worst)
  for (int64_t i = 0; i < n; i++) {
    const auto key = static_cast<uint64_t>(i);
    float x, y, u, v, rx, ry;
    random_pair(key, 0, 4, x, y);
    float a = random_number(key, 5, i % 2 ? 14 : 36);
    if (i % 64 == 0) a = 0;
    if (i % 64 == 1) a = -x;
    if (i % 64 == 2) x = y = 0;
    const double exact = static_cast<double>(x) + y + a, scale = std::max(std::fabs(x), std::fabs(a));
    rounded_two_sum(x, a, u, v);
    rounded_fast_two_sum(u, rn(y + v), rx, ry);
    precondition += u != 0 && exponent_of(u) < exponent_of(rn(y + v));
    mcf::grow(x, y, a);
    other_bits += !same_bits(x, rx) || !same_bits(y, ry);
    not_normalised += rn_from_double(static_cast<double>(x) + y) != x;
    if (scale == 0) continue;
    const double error = std::fabs(static_cast<double>(x) + y - exact) / scale;
    worst = std::max(worst, error);
    squares += error * error;
  }
  EXPECT_EQ(precondition, 0);
  EXPECT_EQ(not_normalised, 0);
  EXPECT_EQ(other_bits, 0);
  EXPECT_LE(worst, 0x1p-15);
  EXPECT_GT(worst, 0x1p-17);
  EXPECT_LT(std::sqrt(squares / n), 0x1p-18) << "2^-19 measured; it depends on how the operands are drawn";
}

struct MulErrors {
  double worst = 0, rms = 0;
  int64_t not_normalised = 0, precondition = 0;
};
// Relative error of mul over random pairs, in units of 2^-16, by a given pair or (c = 0) by random ones.
MulErrors mul_errors(float c0, float d0) {
  constexpr int64_t n = 2'000'000;
  int64_t not_normalised = 0, precondition = 0;
  double worst = 0, squares = 0;
#pragma omp parallel for reduction(+ : not_normalised, precondition, squares) reduction(max : worst)
  for (int64_t i = 0; i < n; i++) {
    const auto key = static_cast<uint64_t>(i);
    float x, y, c = c0, d = d0, p, e;
    random_pair(key, 0, 20, x, y);
    if (c == 0) random_pair(key, 5, 20, c, d);
    const double exact = (static_cast<double>(x) + y) * (static_cast<double>(c) + d);
    mcf::two_prod(x, c, p, e);
    precondition += exponent_of(p) < exponent_of(rn(e + rn(rn(x * d) + rn(y * c))));
    mcf::mul(x, y, c, d);
    not_normalised += rn_from_double(static_cast<double>(x) + y) != x;
    const double error = std::fabs(static_cast<double>(x) + y - exact) / std::fabs(exact);
    worst = std::max(worst, error);
    squares += error * error;
  }
  return {worst * 0x1p16, std::sqrt(squares / n) * 0x1p16, not_normalised, precondition};
}

// The bounds are maxima over 3e7 pairs, and 2e6 pairs come within 40 % of them.
TEST(Expansion, MulIsAccurateToItsBounds) {
  struct Case {
    double beta2, bound;
  };
  for (const auto& [beta2, bound] : {Case{0, 4.2}, Case{.95, 2.8}, Case{.99, 3.9}, Case{.999, 1.3}}) {
    const AdamWScalars k = adamw_scalars(1e-3, .9, beta2, 1e-8, 0, 0, 0, 1);
    const MulErrors errors = mul_errors(k.beta2_hi, k.beta2_lo);
    EXPECT_EQ(errors.precondition, 0) << beta2;
    EXPECT_EQ(errors.not_normalised, 0) << beta2;
    EXPECT_LE(errors.worst, bound) << beta2;
    EXPECT_GT(errors.worst, 0.6 * bound) << beta2;
    if (beta2 == 0) {
      EXPECT_NEAR(errors.rms, .3, .1) << "depends a little on how the pairs are drawn";
    }
  }
}

// beta2 as a pair: hi is exact, lo as printed to six digits.
TEST(Expansion, Beta2Pairs) {
  struct Row {
    double beta2;
    float hi;
    double lo;
  };
  for (const Row& row : {Row{.9, .8984375f, .00156403}, Row{.95, .94921875f, .000782013},
                         Row{.98, .98046875f, -.000469208}, Row{.99, .98828125f, .00171661},
                         Row{.995, .99609375f, -.00109100}, Row{.999, 1, -.000999451}, Row{.9999, 1, -.000100136}}) {
    const AdamWScalars k = adamw_scalars(1e-3, .9, row.beta2, 1e-8, .1, 1, 1, 1);
    EXPECT_EQ(k.beta2_hi, row.hi) << row.beta2;
    EXPECT_NEAR(k.beta2_lo, row.lo, std::fabs(row.lo) * 5e-6) << row.beta2;
    EXPECT_TRUE(same_bits(k.beta2_lo, rn(k.beta2_lo))) << row.beta2;
    const double off = std::fabs(static_cast<double>(k.beta2_hi) + k.beta2_lo - row.beta2) / row.beta2;
    EXPECT_LE(off, 3.1e-6) << "the pair is off by 1e-7 to 3e-6 of beta2";
  }
  for (int i = 1; i < 100000; i++) {  // in double: in fp32 one low part in hundreds changes
    const double beta2 = i / 100000.0;
    const AdamWScalars k = adamw_scalars(1e-3, .9, beta2, 1e-8, .1, 1, 1, 1);
    ASSERT_TRUE(same_bits(k.beta2_hi, rn_from_double(static_cast<float>(beta2))));
    ASSERT_TRUE(same_bits(k.beta2_lo, rn_from_double(static_cast<float>(beta2 - k.beta2_hi))));
  }
}

}  // namespace
