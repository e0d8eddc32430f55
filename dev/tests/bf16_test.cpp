// bf16.h: the rounding over every fp32 number, and the claim that fp32-then-bf16 arithmetic is correctly rounded.
//
// Everything here demands equal bits: rounding has one right answer.
#include "mcf/bf16.h"

#include <gtest/gtest.h>

#include <vector>

#include "dev/tests/numbers.h"
#include "mcf/expansion.h"

namespace {

// Every float; in sanitized builds, which run this 20 times slower, one in 15 (odd, so all bits still vary).
#ifdef __SANITIZE_ADDRESS__
constexpr uint32_t stride = 15;
#else
constexpr uint32_t stride = 1;
#endif

// The reference is round_to_grid(), which has no integer arithmetic in common with rn().
TEST(Bf16, RoundingOfEveryFiniteFloat) {
  int64_t wrong = 0, wrong_grid = 0;
#pragma omp parallel for schedule(dynamic) reduction(+ : wrong, wrong_grid)
  for (int sign_exponent = 0; sign_exponent < 512; sign_exponent++) {
    const int exponent = sign_exponent & 255;
    if (exponent == 255) continue;  // infinities and NaN: below
    const double spacing = std::ldexp(1.0, std::max(exponent, 1) - 127 - 7);
    const double sign = sign_exponent < 256 ? 1.0 : -1.0;
    const uint32_t base = static_cast<uint32_t>(sign_exponent) << 23;
    for (uint32_t significand = 0; significand < 1u << 23; significand += stride) {
      const float x = from_bits(base | significand);
      const double rounded = round_to_grid(std::fabs(static_cast<double>(x)), spacing);
      const float expected = static_cast<float>(std::copysign(rounded, sign));
      wrong += float_bits(rn(x)) != float_bits(expected);
      wrong_grid += float_bits(rn_grid(x)) != float_bits(expected);
    }
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(wrong_grid, 0);
}

TEST(Bf16, RoundingOfInfinitiesAndNaN) {
  int64_t wrong = 0, wrong_grid = 0;
#pragma omp parallel for reduction(+ : wrong, wrong_grid)
  for (uint32_t significand = 0; significand < 1u << 23; significand++)
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const float x = from_bits(sign | 0x7f800000u | significand);
      const float r = rn(x), r_grid = rn_grid(x);
      if (significand == 0) {
        wrong += float_bits(r) != float_bits(x);
        wrong_grid += float_bits(r_grid) != float_bits(x);
        continue;
      }
      wrong += !std::isnan(r) || (float_bits(r) & 0xffffu) || std::signbit(r) != std::signbit(x);
      // rn_grid promises nothing for a NaN with a low bit set, which no operation on grid values makes.
      if (!(significand & 0xffffu)) wrong_grid += !std::isnan(r_grid) || (float_bits(r_grid) & 0xffffu);
    }
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(wrong_grid, 0);
  EXPECT_TRUE(std::isnan(rn(from_bits(0x7fffffffu)))) << "the GPU's default NaN";
}

// What a GPU or CPU hands out as NaN when it makes one: rn_grid must keep it.
TEST(Bf16, NaNMadeFromGridValuesStaysNaN) {
  volatile float inf = INFINITY, zero = 0.0f, minus_one = -1.0f;
  for (const float nan : {inf - inf, zero * inf, zero / zero, std::sqrt(static_cast<float>(minus_one))}) {
    EXPECT_TRUE(std::isnan(nan));
    EXPECT_TRUE(std::isnan(rn_grid(nan)));
    EXPECT_TRUE(std::isnan(rn_grid(rn_grid(nan) * 0.5f + 1.0f)));
  }
}

TEST(Bf16, StorageRoundTrip) {
  for (uint32_t upper = 0; upper < 65536; upper++) {
    const float x = from_bf16(upper);
    bf16 stored{}, cut{};
    store(stored, x);
    store_grid(cut, x);
    EXPECT_EQ(float_bits(to_float(bf16{static_cast<uint16_t>(upper)})), float_bits(x));
    EXPECT_EQ(cut.bits, upper);
    if (std::isnan(x))
      EXPECT_TRUE(std::isnan(to_float(stored))) << upper;
    else
      EXPECT_EQ(stored.bits, upper);
  }
  for (const float x : {1.00390625f, 1.01171875f, -3.14159f, 1e-40f, 3.4e38f}) {  // two ties; the last goes to infinity
    bf16 stored{};
    float plain = 0;
    store(stored, x);
    store(plain, x);
    EXPECT_EQ(float_bits(to_float(stored)), float_bits(rn(x)));
    EXPECT_EQ(float_bits(plain), float_bits(x));
  }
}

// + - * / of bf16 numbers in fp32, then rn: the same as rounding the exact result once, for all pairs of significands
// and both relative signs. The double sums and products are exact (8 + 12 + 1 bits; 16 bits). A double quotient is not,
// but a quotient of 8-bit significands that is no tie differs from one by 2^-17 of itself or more, far beyond 2^-53.
TEST(Bf16, OperationsAreCorrectlyRounded) {
  struct Exponents {
    int a, b;
  };
  // Ordinary numbers at each exponent gap where a sum is not trivially the larger operand; sums and quotients that are
  // subnormal, or overflow. Products are exact in fp32 but for underflow, of which nothing is claimed.
  std::vector<Exponents> cases = {{1, 1},   {2, 1},    {3, 2},     {0, 1},    {20, 146},
                                  {3, 130}, {14, 147}, {254, 254}, {254, 120}};
  for (int gap = -12; gap <= 12; gap++) cases.push_back({127, 127 + gap});
  int64_t wrong_add = 0, wrong_mul = 0, wrong_div = 0;
#pragma omp parallel for reduction(+ : wrong_add, wrong_mul, wrong_div)
  for (uint32_t significand_a = 0; significand_a < 128; significand_a++)
    for (uint32_t significand_b = 0; significand_b < 128; significand_b++)
      for (const uint32_t sign_b : {0u, 0x8000u})
        for (const auto& exponent : cases) {
          const float a = from_bf16(static_cast<uint32_t>(exponent.a) << 7 | significand_a);
          const float b = from_bf16(sign_b | static_cast<uint32_t>(exponent.b) << 7 | significand_b);
          const double ad = a, bd = b;
          wrong_add += float_bits(rn(add_rn(a, b))) != float_bits(rn_from_double(ad + bd));
          wrong_add += float_bits(rn(sub_rn(a, b))) != float_bits(rn_from_double(ad - bd));
          wrong_div += float_bits(rn(div_rn(a, b))) != float_bits(rn_from_double(ad / bd));
          if (std::fabs(ad * bd) >= 0x1p-119 || ad == 0)
            wrong_mul += float_bits(rn(mul_rn(a, b))) != float_bits(rn_from_double(ad * bd));
        }
  EXPECT_EQ(wrong_add, 0);
  EXPECT_EQ(wrong_mul, 0);
  EXPECT_EQ(wrong_div, 0);
}

TEST(Bf16, SquareRootIsCorrectlyRounded) {
  for (uint32_t upper = 0; upper <= 0x7f80; upper++) {
    const float x = from_bf16(upper);
    ASSERT_EQ(float_bits(rn(sqrt_rn(x))), float_bits(rn_from_double(std::sqrt(static_cast<double>(x))))) << x;
  }
}

}  // namespace
