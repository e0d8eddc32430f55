// exp for loops that vectorise and for kernels, and the small matrix product that the CPU twins build on.
//
// glibc declares its vector expf only under -ffast-math, which this program never uses.
#pragma once
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/portable.cuh"

// e^x, within 1 ulp of the exact value for results that are normal numbers; 0 below -87.33, inf above 88.72, NaN to
// NaN. x = n ln2 + r with |r| <= ln2 / 2, ln2 in two parts (Cody and Waite), degree-7 polynomial for e^r, scaled by
// 2^n.
inline float exp_poly(float x) {
  const float clamped = x < -87.33f ? -87.33f : (x > 88.72f ? 88.72f : x);
  const float shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits hold round(x / ln2)
  const float n = shifted - 12582912.0f;
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^n in two factors, since 2^128 is out of range while the product may not be.
  const int32_t e = std::bit_cast<int32_t>(shifted) - 0x4b400000;
  const int32_t half = e >> 1;
  const float scale = std::bit_cast<float>((half + 127) << 23), rest = std::bit_cast<float>((e - half + 127) << 23);
  const float y = p * scale * rest;
  return x < -87.33f ? 0.0f : (x > 88.72f ? HUGE_VALF : (x != x ? x : y));
}

// 1 / (1 + e^-x)
inline float sigmoid(float x) { return 1.0f / (1.0f + exp_poly(-x)); }

// The same on a GPU, by its own 2^x: two instructions instead of about 26, which would cost a kernel that reads a bf16
// and writes one more than its memory does. e^x is within 2^-22 + 1.5 |x| 2^-24 of the exact value, relatively (the
// product's rounding is magnified by |x|): far below bf16's 2^-9, and where |x| is large the term is small beside what
// it is added to. 0 where the result is subnormal, inf above 88.72, NaN to NaN.
__device__ inline float exp_gpu(float x) { return exp2_approx(x * 1.44269504f); }
__device__ inline float sigmoid_gpu(float x) { return 1.0f / (1.0f + exp_gpu(-x)); }

// a*b + c, fused where the processor does it in one instruction; only where the result is not meant to be exact.
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// Register tile of tile_product: rows x columns of accumulators that fit in the vector registers.
#ifdef __AVX512F__
inline constexpr int tile_rows = 8, tile_columns = 32;
#else
inline constexpr int tile_rows = 4, tile_columns = 16;
#endif
inline constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

template <int rows>
[[gnu::always_inline]] inline void tile_product_rows(float* __restrict c, int ldc, const float* __restrict a, int lda,
                                                     const float* __restrict b, int ldb, int k, bool accumulate) {
  float sum[rows][tile_columns];
  for (int i = 0; i < rows; i++)
#pragma omp simd
    for (int j = 0; j < tile_columns; j++) sum[i][j] = accumulate ? c[i * ldc + j] : 0.0f;
  for (int l = 0; l < k; l++)
    for (int i = 0; i < rows; i++)
#pragma omp simd
      for (int j = 0; j < tile_columns; j++) sum[i][j] = multiply_add(a[i * lda + l], b[l * ldb + j], sum[i][j]);
  for (int i = 0; i < rows; i++)
#pragma omp simd
    for (int j = 0; j < tile_columns; j++) c[i * ldc + j] = sum[i][j];
}

// C (m,n) = A (m,k) B (k,n), or += : fp32, row-major, by one thread. ldb and ldc must reach round_up(n, tile_columns):
// whole tiles of columns are read and written, whatever the padding of B holds.
inline void tile_product(float* c, int ldc, const float* a, int lda, const float* b, int ldb, int m, int n, int k,
                         bool accumulate) {
  for (int j = 0; j < n; j += tile_columns) {
    int i = 0;
    for (; i + tile_rows <= m; i += tile_rows)
      tile_product_rows<tile_rows>(c + static_cast<size_t>(i) * ldc + j, ldc, a + static_cast<size_t>(i) * lda, lda,
                                   b + j, ldb, k, accumulate);
    for (; i < m; i++)
      tile_product_rows<1>(c + static_cast<size_t>(i) * ldc + j, ldc, a + static_cast<size_t>(i) * lda, lda, b + j, ldb,
                           k, accumulate);
  }
}
