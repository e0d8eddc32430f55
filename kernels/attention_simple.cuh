// Attention for any head width d and any element type, on plain arithmetic in fp32: what the tensor-core kernels
// (attention_forward.cuh, attention_backward.cuh) don't take, and the shortest way to see what those compute.
//   S = Q K^T / sqrt(d), P = softmax over keys k <= q, O = P V      qkv (B,T,3,NH,d), out (B,T,NH,d), lse (B,NH,T)
//   D = rowsum(dO * O), dP = dO V^T, dS = P * (dP - D), dQ = dS K / sqrt(d), dK = dS^T Q / sqrt(d), dV = P^T dO
//
// One warp makes one row of a result. It goes along the other side in steps of 32 rows: for the scores a lane is one of
// those 32 rows and runs along d; for the result a lane is a column (every 32nd) and runs along the 32 rows. Between
// the two the 32 numbers pass through shared memory. The online softmax is that of Milakov and Gimelshein (arXiv
// 1805.02867): when the maximum grows, what has been summed so far is scaled down.
#pragma once
#include <type_traits>

#include "kernels/portable.cuh"
#include "mcf/bf16.h"

__device__ inline float attention_float(float x) { return x; }
__device__ inline float attention_float(bf16 x) { return bf16_bits_to_float(x.bits); }
__device__ inline void attention_store(float& to, float x) { to = x; }
__device__ inline void attention_store(bf16& to, float x) { to.bits = float_to_bf16_bits(x); }

// All lanes receive the sum; the order of additions is fixed.
__device__ inline float attention_warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(all_lanes, x, offset);
  return x;
}
__device__ inline float attention_warp_max(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(all_lanes, x, offset));
  return x;
}

template <class floatX>
__device__ inline float attention_dot(const float* a, const floatX* b, int d) {
  float sum = 0.0f;
  for (int i = 0; i < d; i++) sum = fmaf(a[i], attention_float(b[i]), sum);
  return sum;
}

// Where a warp stands: the row of its result, and that row's sequence and head.
struct AttentionRow {
  int64_t index;  // in (B,NH,T)
  int bh, t;
  int64_t sequence, head;  // elements from qkv (stride 3C) or out (stride C) to (b, 0, h, 0)
};
// Rows of one head follow each other in a block, for the cache; the last ones first, as they see the most keys.
__device__ inline AttentionRow attention_row(int T, int NH, int d, bool last_first) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (blockDim.x / warp_size) + threadIdx.x / warp_size;
  AttentionRow row;
  row.bh = static_cast<int>(index / T);
  row.t = static_cast<int>(index % T);
  if (last_first) row.t = T - 1 - row.t;
  row.index = static_cast<int64_t>(row.bh) * T + row.t;
  row.sequence = static_cast<int64_t>(row.bh / NH) * T * NH * d;
  row.head = static_cast<int64_t>(row.bh % NH) * d;
  return row;
}

// Shared memory (warps, 2d + 32) fp32: the query, its output, 32 probabilities.
template <class floatX>
__global__ void attention_forward_simple_kernel(floatX* out, float* lse, const floatX* qkv, int64_t rows, int T, int NH,
                                                int d, float scale) {
  SHARED_DYNAMIC(float, memory);
  const AttentionRow row = attention_row(T, NH, d, true);
  if (row.index >= rows) return;
  const int lane = static_cast<int>(threadIdx.x % warp_size), warp = static_cast<int>(threadIdx.x / warp_size);
  const int C = NH * d, stride = 3 * C;
  const floatX* Q = qkv + 3 * row.sequence + row.head;
  const floatX *K = Q + C, *V = K + C;
  float *q = memory + static_cast<size_t>(warp) * (2 * d + 32), *o = q + d, *p = o + d;

  for (int i = lane; i < d; i += warp_size) {
    q[i] = attention_float(Q[static_cast<int64_t>(row.t) * stride + i]);
    o[i] = 0.0f;
  }
  __syncwarp();
  float max = -INFINITY, sum = 0.0f;
  for (int k0 = 0; k0 <= row.t; k0 += warp_size) {
    const int key = k0 + lane;
    const float score = key <= row.t ? scale * attention_dot(q, K + static_cast<int64_t>(key) * stride, d) : -INFINITY;
    const float new_max = fmaxf(max, attention_warp_max(score));
    const float correction = expf(max - new_max), probability = expf(score - new_max);
    sum = sum * correction + attention_warp_sum(probability);
    max = new_max;
    p[lane] = probability;
    __syncwarp();
    for (int i = lane; i < d; i += warp_size) {
      float x = o[i] * correction;
      for (int j = 0; j < warp_size && k0 + j <= row.t; j++)
        x = fmaf(p[j], attention_float(V[static_cast<int64_t>(k0 + j) * stride + i]), x);
      o[i] = x;
    }
    __syncwarp();
  }
  for (int i = lane; i < d; i += warp_size)
    attention_store(out[row.sequence + static_cast<int64_t>(row.t) * C + row.head + i], o[i] / sum);
  if (lane == 0) lse[row.index] = max + logf(sum);
}

// D (B,NH,T) = rowsum(dO * O)
template <class floatX>
__global__ void attention_D_simple_kernel(float* D, const floatX* dout, const floatX* out, int64_t rows, int T, int NH,
                                          int d) {
  const AttentionRow row = attention_row(T, NH, d, false);
  if (row.index >= rows) return;
  const int lane = static_cast<int>(threadIdx.x % warp_size);
  const int64_t at = row.sequence + static_cast<int64_t>(row.t) * NH * d + row.head;
  float sum = 0.0f;
  for (int i = lane; i < d; i += warp_size)
    sum = fmaf(attention_float(dout[at + i]), attention_float(out[at + i]), sum);
  sum = attention_warp_sum(sum);
  if (lane == 0) D[row.index] = sum;
}

// dQ, a warp for each query row. Shared memory (warps, 3d + 32) fp32: the query, its dO, its dQ, 32 numbers of dS.
template <class floatX>
__global__ void attention_dQ_simple_kernel(floatX* dqkv, const floatX* dout, const float* lse, const float* D,
                                           const floatX* qkv, int64_t rows, int T, int NH, int d, float scale) {
  SHARED_DYNAMIC(float, memory);
  const AttentionRow row = attention_row(T, NH, d, true);
  if (row.index >= rows) return;
  const int lane = static_cast<int>(threadIdx.x % warp_size), warp = static_cast<int>(threadIdx.x / warp_size);
  const int C = NH * d, stride = 3 * C;
  const floatX* Q = qkv + 3 * row.sequence + row.head;
  const floatX *K = Q + C, *V = K + C, *dO = dout + row.sequence + row.head;
  float *q = memory + static_cast<size_t>(warp) * (3 * d + 32), *od = q + d, *dq = od + d, *ds = dq + d;

  for (int i = lane; i < d; i += warp_size) {
    q[i] = attention_float(Q[static_cast<int64_t>(row.t) * stride + i]);
    od[i] = attention_float(dO[static_cast<int64_t>(row.t) * C + i]);
    dq[i] = 0.0f;
  }
  __syncwarp();
  for (int k0 = 0; k0 <= row.t; k0 += warp_size) {
    const int key = k0 + lane;
    if (key <= row.t) {
      const int64_t at = static_cast<int64_t>(key) * stride;
      const float p = expf(scale * attention_dot(q, K + at, d) - lse[row.index]);
      ds[lane] = p * (attention_dot(od, V + at, d) - D[row.index]);
    }
    __syncwarp();
    for (int i = lane; i < d; i += warp_size)
      for (int j = 0; j < warp_size && k0 + j <= row.t; j++)
        dq[i] = fmaf(ds[j], attention_float(K[static_cast<int64_t>(k0 + j) * stride + i]), dq[i]);
    __syncwarp();
  }
  for (int i = lane; i < d; i += warp_size)
    attention_store(dqkv[3 * row.sequence + static_cast<int64_t>(row.t) * stride + row.head + i], dq[i] * scale);
}

// dK and dV, a warp for each key row. Shared memory (warps, 4d + 64) fp32: key, value, their gradients, 32 of P and dS.
template <class floatX>
__global__ void attention_dKV_simple_kernel(floatX* dqkv, const floatX* dout, const float* lse, const float* D,
                                            const floatX* qkv, int64_t rows, int T, int NH, int d, float scale) {
  SHARED_DYNAMIC(float, memory);
  const AttentionRow row = attention_row(T, NH, d, false);
  if (row.index >= rows) return;
  const int lane = static_cast<int>(threadIdx.x % warp_size), warp = static_cast<int>(threadIdx.x / warp_size);
  const int C = NH * d, stride = 3 * C;
  const floatX* Q = qkv + 3 * row.sequence + row.head;
  const floatX *K = Q + C, *V = K + C, *dO = dout + row.sequence + row.head;
  float *k = memory + static_cast<size_t>(warp) * (4 * d + 64), *v = k + d, *dk = v + d, *dv = dk + d;
  float *p = dv + d, *ds = p + warp_size;

  for (int i = lane; i < d; i += warp_size) {
    k[i] = attention_float(K[static_cast<int64_t>(row.t) * stride + i]);
    v[i] = attention_float(V[static_cast<int64_t>(row.t) * stride + i]);
    dk[i] = dv[i] = 0.0f;
  }
  __syncwarp();
  for (int q0 = row.t; q0 < T; q0 += warp_size) {
    const int query = q0 + lane;
    if (query < T) {
      const int64_t stat = static_cast<int64_t>(row.bh) * T + query;
      p[lane] = expf(scale * attention_dot(k, Q + static_cast<int64_t>(query) * stride, d) - lse[stat]);
      ds[lane] = p[lane] * (attention_dot(v, dO + static_cast<int64_t>(query) * C, d) - D[stat]);
    }
    __syncwarp();
    for (int i = lane; i < d; i += warp_size)
      for (int j = 0; j < warp_size && q0 + j < T; j++) {
        dk[i] = fmaf(ds[j], attention_float(Q[static_cast<int64_t>(q0 + j) * stride + i]), dk[i]);
        dv[i] = fmaf(p[j], attention_float(dO[static_cast<int64_t>(q0 + j) * C + i]), dv[i]);
      }
    __syncwarp();
  }
  floatX* to = dqkv + 3 * row.sequence + static_cast<int64_t>(row.t) * stride + row.head + C;
  for (int i = lane; i < d; i += warp_size) {
    attention_store(to[i], dk[i] * scale);
    attention_store(to[C + i], dv[i]);
  }
}

// Blocks for B*NH heads times `tiles`, all in the grid's x dimension: y ends at 65535, x at 2^31 - 1.
inline unsigned attention_blocks(int B, int NH, int64_t tiles) {
  const int64_t blocks = static_cast<int64_t>(B) * NH * tiles;
  CHECK(blocks < int64_t{1} << 31, "attention of %lld blocks: B = %d, NH = %d; use a smaller batch",
        static_cast<long long>(blocks), B, NH);
  return static_cast<unsigned>(blocks);
}

// Four warps a block, or as many as their rows leave room for in the 48 KiB that every GPU has.
struct AttentionSimpleGrid {
  int64_t rows;
  unsigned blocks, threads;
  size_t bytes;
  AttentionSimpleGrid(int B, int T, int NH, int warp_floats) : rows(static_cast<int64_t>(B) * NH * T) {
    const size_t warp_bytes = static_cast<size_t>(warp_floats) * sizeof(float), room = size_t{48} << 10;
    if (warp_bytes > room)
      RUN_ERROR(
          "attention: a head of this width needs %zu bytes of shared memory, "
          "at most %zu are there; use more heads (--heads)",
          warp_bytes, room);
    const size_t warps = warp_bytes * 4 <= room ? 4 : room / warp_bytes;
    blocks = attention_blocks(1, 1, (rows + static_cast<int64_t>(warps) - 1) / static_cast<int64_t>(warps));
    threads = static_cast<unsigned>(warps) * warp_size;
    bytes = warps * warp_bytes;
  }
};

template <class floatX>
void attention_forward_simple(floatX* out, float* lse, const floatX* qkv, int B, int T, int C, int NH,
                              cudaStream_t stream) {
  const int d = C / NH;
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  const AttentionSimpleGrid grid(B, T, NH, 2 * d + 32);
  launch(attention_forward_simple_kernel<floatX>, grid.blocks, grid.threads, grid.bytes, stream, out, lse, qkv,
         grid.rows, T, NH, d, scale);
}

template <class floatX>
void attention_backward_simple(floatX* dqkv, const floatX* dout, const floatX* out, const float* lse, float* D,
                               const floatX* qkv, int B, int T, int C, int NH, cudaStream_t stream) {
  const int d = C / NH;
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  const AttentionSimpleGrid rows(B, T, NH, 0), queries(B, T, NH, 3 * d + 32), keys(B, T, NH, 4 * d + 64);
  launch(attention_D_simple_kernel<floatX>, rows.blocks, rows.threads, rows.bytes, stream, D, dout, out, rows.rows, T,
         NH, d);
  launch(attention_dQ_simple_kernel<floatX>, queries.blocks, queries.threads, queries.bytes, stream, dqkv, dout, lse, D,
         qkv, queries.rows, T, NH, d, scale);
  launch(attention_dKV_simple_kernel<floatX>, keys.blocks, keys.threads, keys.bytes, stream, dqkv, dout, lse, D, qkv,
         keys.rows, T, NH, d, scale);
}
