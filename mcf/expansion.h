// Multi-component floats of length 2: error-free transforms on bf16 values, and what is built on them.
//
// A pair (x, y) stands for the unevaluated sum x + y of two bf16 numbers, |y| at most half an ulp of x. Every value
// here is a float that lies on the bf16 grid; rn_grid() rounds to it; add_rn, sub_rn, mul_rn (kernels/portable.cuh) are
// one fp32 operation each, never fused. Method: Yu et al., "Collage: Light-Weight Low-Precision Strategy for LLM
// Training", arXiv 2405.03637, section 3; the transforms are Dekker's (1971), Knuth's (TAOCP 2, 4.2.2) and Priest's.
//
// Results go out through references: a helper that returns a struct keeps g++ from vectorising the caller.
#pragma once
#include "mcf/bf16.h"

namespace mcf {

// s + e = a + b exactly, s = rn(a + b). Needs exponent(a) >= exponent(b) or a = 0 (the exponent of 0 and of a subnormal
// is -126), and s finite. 3 operations (Dekker 1971). Both differences are exact in fp32, so rounding them is left out.
__host__ __device__ inline void fast_two_sum(float a, float b, float& s, float& e) {
  s = rn_grid(add_rn(a, b));
  e = sub_rn(b, sub_rn(s, a));
}

// s + e = a + b exactly, s = rn(a + b), for all finite a and b while s is finite. 6 operations (Knuth). The
// five roundings of the error term change no bit (expansion_test.cpp shows it over all significands at each exponent
// gap) and are left out; with them an operand of +-0x7f7f, the largest bf16, could make e NaN.
__host__ __device__ inline void two_sum(float a, float b, float& s, float& e) {
  s = rn_grid(add_rn(a, b));
  const float t = sub_rn(s, a);
  e = add_rn(sub_rn(a, sub_rn(s, t)), sub_rn(b, t));
}

// p + e = a * b exactly, p = rn(a * b), if exponent(a) + exponent(b) >= -119 and p is finite. Below that e underflows:
// at -120 a quarter of all significand pairs are inexact. Needs no fma, since a product of two bf16 is exact in fp32.
__host__ __device__ inline void two_prod(float a, float b, float& p, float& e) {
  const float product = mul_rn(a, b);
  p = rn_grid(product);
  e = rn_grid(sub_rn(product, p));
}

// (x, y) += a. Exact but for rn(y + v): off by at most 2^-15 of max(|x|, |a|). x + y normalised before and after.
// The paper's Grow takes Fast2Sum for the first sum, whose precondition fails where |a| > |x| (zero-initialised biases,
// weights passing through 0); two_sum equals it wherever it is valid, and is exact everywhere.
__host__ __device__ inline void grow(float& x, float& y, float a) {
  float u, v;
  two_sum(x, a, u, v);
  fast_two_sum(u, rn_grid(add_rn(y, v)), x, y);
}

// (x, y) *= (c, d), both normalised. y*d is dropped: relative error at most 4.2 * 2^-16, rms 0.3 * 2^-16.
__host__ __device__ inline void mul(float& x, float& y, float c, float d) {
  float p, e;
  two_prod(x, c, p, e);
  e = rn_grid(add_rn(e, rn_grid(add_rn(rn_grid(mul_rn(x, d)), rn_grid(mul_rn(y, c))))));
  fast_two_sum(p, e, x, y);
}

// The same as the paper's released code has it: its in-place product overwrites x before the error term is computed, so
// e is p*c - p in place of x*c - p, and the last sum is not renormalised. A second moment that decays by it is .3 to .5
// of what it should be. For comparisons with published runs only.
__host__ __device__ inline void mul_as_released(float& x, float& y, float c, float d) {
  const float p = rn_grid(mul_rn(x, c));
  const float e = rn_grid(sub_rn(mul_rn(p, c), p));
  y = rn_grid(add_rn(rn_grid(add_rn(rn_grid(mul_rn(y, c)), mul_rn(p, d))), e));
  x = rn_grid(add_rn(p, y));
}

}  // namespace mcf
