// What the number tests share: an independent rounding to bf16, and normal random numbers.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/portable.cuh"  // float_bits
#include "runtime/random.h"

inline float from_bits(uint32_t u) { return std::bit_cast<float>(u); }
// The bf16 number with these 16 bits, as a float.
inline float from_bf16(uint32_t upper) { return from_bits(upper << 16); }
inline bool same_bits(float a, float b) { return float_bits(a) == float_bits(b); }

// Rounds a magnitude to a multiple of spacing without looking at bits: adding and subtracting 2^52 spacings leaves a
// multiple, ties to even, because a double has 53 bits.
inline double round_to_grid(double magnitude, double spacing) {
  const double shift = 0x1p52 * spacing;
  const double rounded = (magnitude + shift) - shift;
  return rounded < 0x1p128 ? rounded : INFINITY;  // 2^128 is the first multiple beyond the largest finite bf16
}

// Rounds a double once to the bf16 grid, whose spacing is 2^(exponent - 7), and 2^-133 below 2^-126.
inline float rn_from_double(double x) {
  if (x == 0 || !std::isfinite(x)) return static_cast<float>(x);
  const double spacing = std::ldexp(1.0, std::max(std::ilogb(x), -126) - 7);
  return static_cast<float>(std::copysign(round_to_grid(std::fabs(x), spacing), x));
}

// Standard normal of a key (Box and Muller). Keyed and without state, so loops that use it can run in parallel.
inline double normal(uint64_t a, uint64_t b = 0) {
  const double radius = std::sqrt(-2 * std::log1p(-random_uniform(a, b, 0)));
  return radius * std::cos(6.283185307179586 * random_uniform(a, b, 1));
}
