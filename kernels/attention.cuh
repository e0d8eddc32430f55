// Causal multi-head attention, flash style: no array of B*NH*T*T values exists at any time.
//   S = Q K^T / sqrt(d), P = softmax over keys k <= q, O = P V      per batch element and head, d = C / NH
// Forward keeps the log-sum-exp of each row of S; backward computes P again from it (Dao et al., arXiv 2205.14135).
// qkv is packed as the product that makes it leaves it: (B,T,3,NH,d).
#pragma once
#include <algorithm>
#include <cmath>

#include "kernels/attention_backward.cuh"
#include "kernels/attention_forward.cuh"
#include "kernels/device.h"
#include "kernels/vector_math.h"
#include "mcf/bf16.h"

// The CPU twin works on tiles of this many queries against all keys they may see, in fp32.
inline constexpr int attention_query_tile = 32;

// Rows of a (T, stride) matrix to a dense fp32 (T, ld) one times scale, the padding d..ld-1 zero.
template <class floatX>
void attention_gather_cpu(float* to, int ld, const floatX* from, size_t stride, int T, int d, float scale) {
  for (int t = 0; t < T; t++) {
#pragma omp simd
    for (int i = 0; i < d; i++) to[static_cast<size_t>(t) * ld + i] = to_float(from[t * stride + i]) * scale;
    for (int i = d; i < ld; i++) to[static_cast<size_t>(t) * ld + i] = 0;
  }
}

// to (columns, ldt) = from (rows, ldf) transposed; the padding rows..ldt-1 zero.
inline void attention_transpose_cpu(float* to, int ldt, const float* from, int ldf, int rows, int columns) {
  for (int c = 0; c < columns; c++) {
    float* row = to + static_cast<size_t>(c) * ldt;
    for (int r = 0; r < rows; r++) row[r] = from[static_cast<size_t>(r) * ldf + c];
    for (int r = rows; r < ldt; r++) row[r] = 0;
  }
}

// out (B,T,C), lse (B,NH,T) from qkv (B,T,3C)
template <class floatX>
void attention_forward_cpu(floatX* out, float* lse, const floatX* qkv, int B, int T, int C, int NH, Device& device) {
  const int d = C / NH, ldd = round_up(d, tile_columns), ldt = round_up(T, tile_columns);
  const size_t stride = size_t{3} * C;
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
#pragma omp parallel for schedule(dynamic)
  for (int bh = 0; bh < B * NH; bh++) {
    const floatX* q = qkv + static_cast<size_t>(bh / NH) * T * stride + static_cast<size_t>(bh % NH) * d;
    floatX* o = out + static_cast<size_t>(bh / NH) * T * C + static_cast<size_t>(bh % NH) * d;
    float* Q = device.scratch<float>(0, static_cast<size_t>(T) * ldd * 3 + static_cast<size_t>(ldd) * ldt);
    float* V = Q + static_cast<size_t>(T) * ldd;
    float* K = V + static_cast<size_t>(T) * ldd;
    float* Kt = K + static_cast<size_t>(T) * ldd;
    float* S = device.scratch<float>(1, static_cast<size_t>(attention_query_tile) * (ldt + ldd));
    float* O = S + static_cast<size_t>(attention_query_tile) * ldt;
    attention_gather_cpu(Q, ldd, q, stride, T, d, scale);
    attention_gather_cpu(K, ldd, q + C, stride, T, d, 1.0f);
    attention_gather_cpu(V, ldd, q + 2 * C, stride, T, d, 1.0f);
    attention_transpose_cpu(Kt, ldt, K, ldd, T, d);
    for (int q0 = 0; q0 < T; q0 += attention_query_tile) {
      const int rows = std::min(attention_query_tile, T - q0), keys = q0 + rows;
      tile_product(S, ldt, Q + static_cast<size_t>(q0) * ldd, ldd, Kt, ldt, rows, keys, d, false);
      for (int r = 0; r < rows; r++) {
        float* s = S + static_cast<size_t>(r) * ldt;
        const int seen = q0 + r + 1;
        float max = s[0], sum = 0;
#pragma omp simd reduction(max : max)
        for (int k = 0; k < seen; k++) max = s[k] > max ? s[k] : max;
#pragma omp simd reduction(+ : sum)
        for (int k = 0; k < seen; k++) sum += s[k] = exp_poly(s[k] - max);
        const float inverse = 1.0f / sum;
#pragma omp simd
        for (int k = 0; k < seen; k++) s[k] *= inverse;
        for (int k = seen; k < keys; k++) s[k] = 0;
        lse[static_cast<size_t>(bh) * T + q0 + r] = max + std::log(sum);
      }
      tile_product(O, ldd, S, ldt, V, ldd, rows, d, keys, false);
      for (int r = 0; r < rows; r++)
#pragma omp simd
        for (int i = 0; i < d; i++) store(o[static_cast<size_t>(q0 + r) * C + i], O[r * ldd + i]);
    }
  }
}

// dqkv (B,T,3C) from dout (B,T,C) and what forward saw and made.
// With D = rowsum(dO * O):  dP = dO V^T,  dS = P * (dP - D),  dQ = dS K / sqrt(d),  dK = dS^T Q / sqrt(d),  dV = P^T dO
template <class floatX>
void attention_backward_cpu(floatX* dqkv, const floatX* dout, const floatX* out, const float* lse, const floatX* qkv,
                            int B, int T, int C, int NH, Device& device) {
  const int d = C / NH, ldd = round_up(d, tile_columns), ldt = round_up(T, tile_columns);
  const int tile = attention_query_tile, ldq = round_up(tile, tile_columns);
  const size_t stride = size_t{3} * C, matrix = static_cast<size_t>(T) * ldd,
               transposed = static_cast<size_t>(ldd) * ldt;
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
#pragma omp parallel for schedule(dynamic)
  for (int bh = 0; bh < B * NH; bh++) {
    const size_t head = static_cast<size_t>(bh % NH) * d;
    const floatX* q = qkv + static_cast<size_t>(bh / NH) * T * stride + head;
    floatX* dq = dqkv + static_cast<size_t>(bh / NH) * T * stride + head;
    const floatX* o = out + static_cast<size_t>(bh / NH) * T * C + head;
    const floatX* od = dout + static_cast<size_t>(bh / NH) * T * C + head;
    float* Q = device.scratch<float>(0, 6 * matrix + 2 * transposed);
    float *K = Q + matrix, *V = K + matrix, *dO = V + matrix, *dK = dO + matrix, *dV = dK + matrix;
    float *Kt = dV + matrix, *Vt = Kt + transposed;
    float* P = device.scratch<float>(1, static_cast<size_t>(tile) * (2 * ldt + ldd) + static_cast<size_t>(ldt) * ldq);
    float *dS = P + static_cast<size_t>(tile) * ldt, *dQ = dS + static_cast<size_t>(tile) * ldt;
    float* turned = dQ + static_cast<size_t>(tile) * ldd;  // P or dS of the tile, transposed: (keys, ldq)
    attention_gather_cpu(Q, ldd, q, stride, T, d, scale);
    attention_gather_cpu(K, ldd, q + C, stride, T, d, 1.0f);
    attention_gather_cpu(V, ldd, q + 2 * C, stride, T, d, 1.0f);
    attention_gather_cpu(dO, ldd, od, static_cast<size_t>(C), T, d, 1.0f);
    attention_transpose_cpu(Kt, ldt, K, ldd, T, d);
    attention_transpose_cpu(Vt, ldt, V, ldd, T, d);
    std::fill(dK, dK + 2 * matrix, 0.0f);
    for (int q0 = 0; q0 < T; q0 += tile) {
      const int rows = std::min(tile, T - q0), keys = q0 + rows;
      const float *Qt = Q + static_cast<size_t>(q0) * ldd, *dOt = dO + static_cast<size_t>(q0) * ldd;
      tile_product(P, ldt, Qt, ldd, Kt, ldt, rows, keys, d, false);
      tile_product(dS, ldt, dOt, ldd, Vt, ldt, rows, keys, d, false);
      for (int r = 0; r < rows; r++) {
        float *p = P + static_cast<size_t>(r) * ldt, *ds = dS + static_cast<size_t>(r) * ldt;
        const float l = lse[static_cast<size_t>(bh) * T + q0 + r];
        const int seen = q0 + r + 1;
        float D = 0;
#pragma omp simd reduction(+ : D)
        for (int i = 0; i < d; i++)
          D += dOt[static_cast<size_t>(r) * ldd + i] * to_float(o[static_cast<size_t>(q0 + r) * C + i]);
#pragma omp simd
        for (int k = 0; k < seen; k++) {
          p[k] = exp_poly(p[k] - l);
          ds[k] = p[k] * (ds[k] - D);
        }
        for (int k = seen; k < keys; k++) p[k] = ds[k] = 0;
      }
      attention_transpose_cpu(turned, ldq, P, ldt, rows, keys);
      tile_product(dV, ldd, turned, ldq, dOt, ldd, keys, d, rows, true);
      attention_transpose_cpu(turned, ldq, dS, ldt, rows, keys);
      tile_product(dK, ldd, turned, ldq, Qt, ldd, keys, d, rows, true);  // Q carries the scale
      tile_product(dQ, ldd, dS, ldt, K, ldd, rows, d, keys, false);
      for (int r = 0; r < rows; r++)
#pragma omp simd
        for (int i = 0; i < d; i++) store(dq[(q0 + r) * stride + i], dQ[r * ldd + i] * scale);
    }
    for (int t = 0; t < T; t++)
#pragma omp simd
      for (int i = 0; i < d; i++) {
        store(dq[t * stride + C + i], dK[static_cast<size_t>(t) * ldd + i]);
        store(dq[t * stride + 2 * C + i], dV[static_cast<size_t>(t) * ldd + i]);
      }
  }
}

template <class floatX>
void attention_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int C, int NH, Device& device) {
  Scope scope("attention_forward", device);
  if (device.is_cuda()) return attention_forward_cuda(out, lse, qkv, B, T, C, NH, device.stream());
  attention_forward_cpu(out, lse, qkv, B, T, C, NH, device);
}
template <class floatX>
void attention_backward(floatX* dqkv, const floatX* dout, const floatX* out, const float* lse, const floatX* qkv, int B,
                        int T, int C, int NH, Device& device) {
  Scope scope("attention_backward", device);
  if (device.is_cuda()) {
    float* D = device.scratch<float>(0, static_cast<size_t>(B) * NH * T);
    return attention_backward_cuda(dqkv, dout, out, lse, D, qkv, B, T, C, NH, device.stream());
  }
  attention_backward_cpu(dqkv, dout, out, lse, qkv, B, T, C, NH, device);
}
