// Attention forward on tensor cores (bf16), after FlashAttention-2 (Dao, arXiv 2307.08691):
//   out (B,T,NH,d) = softmax(Q K^T / sqrt(d)) V with keys k <= q only;  lse (B,NH,T) fp32, the natural log of the sum
//   from qkv (B,T,3,NH,d), d = 32, 64, 80, 96 or 128, any T. Other d, and fp32: attention_simple.cuh.
//
// One block for each (batch, head, query tile); each of its four warps owns 16 query rows, or 32, and meets all their
// keys, so that maximum and sum of a row never leave the four lanes that hold it. Key tiles come from the diagonal
// down: the first ones are those that need masking. K has two buffers and V has one: while one product runs, the
// operand of the next is on its way. S and P stay in registers. Heavy query tiles come first.
//
// Rounding: S in fp32; P, not yet divided by its sum, to bf16; O in fp32, divided at the end, to bf16.
#pragma once
#include "kernels/attention_simple.cuh"
#include "kernels/attention_tiles.cuh"

// One step of the online softmax, for the rows g and g + 8 of 16 queries: s (16, keys), in units of the product Q K^T,
// becomes P relative to the rows' new maxima; o and the sums are scaled down to them. Scores turn into powers of two,
// as exp2 costs one instruction. A quad shares a row: each lane of it sums its own columns, until the end.
template <int d, int keys>
__device__ inline void softmax_step(float (&s)[keys / 8][4], float (&o)[d / 8][4], float (&row_max)[2],
                                    float (&row_sum)[2], float scale_log2) {
  UNROLL
  for (int half = 0; half < 2; half++) {
    float max = row_max[half];
    UNROLL
    for (int n = 0; n < keys / 8; n++) max = fmaxf(max, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    max = fmaxf(max, __shfl_xor_sync(all_lanes, max, 1));
    max = fmaxf(max, __shfl_xor_sync(all_lanes, max, 2));
    const float shift = max == -INFINITY ? 0.0f : max * scale_log2;  // no key yet: exp2(-inf - 0) is 0, not NaN
    const float correction = exp2_approx(fmaf(row_max[half], scale_log2, -shift));
    row_max[half] = max;
    float sum = row_sum[half] * correction;
    UNROLL
    for (int n = 0; n < keys / 8; n++) {
      UNROLL
      for (int e = 2 * half; e < 2 * half + 2; e++) {
        s[n][e] = exp2_approx(fmaf(s[n][e], scale_log2, -shift));
        sum += s[n][e];
      }
    }
    row_sum[half] = sum;
    UNROLL
    for (int c = 0; c < d / 8; c++) {
      o[c][2 * half] *= correction;
      o[c][2 * half + 1] *= correction;
    }
  }
}

// In blockIdx.x: head fastest, then query tiles from the last, which has the most keys, to the first.
template <int d, int row_tiles, int keys, bool resident, int blocks>
__global__ void __launch_bounds__(attention_threads, blocks)
    attention_forward_kernel(bf16* out, float* lse, const bf16* qkv, int heads, int T, int C, int NH, float scale) {
  using Tile = AttentionTile<d>;
  constexpr int warp_rows = 16 * row_tiles, queries = attention_warps * warp_rows;
  constexpr shared_address tile_bytes = keys * Tile::row_bytes;
  static_assert((!resident || queries <= 2 * keys) && 64 <= 2 * keys && keys % 16 == 0);
  SHARED_DYNAMIC(unsigned char, smem);  // K, K, V; Q in place of the second K and V, or behind them
  const shared_address K = to_shared(smem), V = K + 2 * tile_bytes, Q = resident ? K + tile_bytes : V + tile_bytes;

  const int lane = static_cast<int>(threadIdx.x % warp_size), warp = static_cast<int>(threadIdx.x / warp_size);
  const int g = lane / 4, t = lane % 4;
  const int query_tiles = (T + queries - 1) / queries;
  const int bh = static_cast<int>(blockIdx.x) % heads, b = bh / NH, h = bh % NH;
  const int q0 = (query_tiles - 1 - static_cast<int>(blockIdx.x) / heads) * queries, warp_q0 = q0 + warp * warp_rows;
  const int stride = 3 * C;
  const bf16* q = qkv + static_cast<int64_t>(b) * T * stride + h * d;
  const bf16 *k = q + C, *v = k + C;

  const int last_query = q0 + queries < T ? q0 + queries - 1 : T - 1;
  int key_tile = last_query / keys;
  fetch_tile<d, queries>(Q, q, stride, q0, T);
  cp_async_commit();
  fetch_tile<d, keys>(K, k, stride, key_tile * keys, T);
  cp_async_commit();
  uint32_t fragment_q[row_tiles][d / 16][4];
  if constexpr (resident) {
    cp_async_wait<1>();
    __syncthreads();
    UNROLL
    for (int r = 0; r < row_tiles; r++) load_rows<d>(fragment_q[r], Q, warp * warp_rows + 16 * r);
  }

  // [r][half]: row 16 r + 8 half + g of the warp.
  const float scale_log2 = scale * 1.44269504f;
  float o[row_tiles][d / 8][4] = {}, row_max[row_tiles][2], row_sum[row_tiles][2];
  UNROLL
  for (int r = 0; r < row_tiles; r++) {
    row_max[r][0] = row_max[r][1] = -INFINITY;
    row_sum[r][0] = row_sum[r][1] = 0.0f;
  }

  const shared_address lane_at = lane_offset<d>();
  for (shared_address buffer = 0; key_tile >= 0; key_tile--, buffer ^= 1) {
    const int k0 = key_tile * keys;
    cp_async_wait<0>();  // K
    // One barrier for two things: K has arrived for all, and all have left the V (and Q) that is overwritten now.
    __syncthreads();
    fetch_tile<d, keys>(V, v, stride, k0, T);
    cp_async_commit();

    // With more queries than keys in a tile, the first warps see nothing of the last keys.
    const bool sees = queries <= keys || k0 < warp_q0 + warp_rows;
    float s[row_tiles][keys / 8][4] = {};
    const shared_address K_lane = K + buffer * tile_bytes + lane_at,
                         Q_lane = Q + warp * warp_rows * Tile::row_bytes + lane_at;
    if (sees) {
      UNROLL
      for (int i = 0; i < d / 16; i++) {
        if constexpr (!resident) {
          UNROLL
          for (int r = 0; r < row_tiles; r++)
            ldmatrix_x4(fragment_q[r][i], Tile::along(Q_lane, i) + r * 16 * Tile::row_bytes);
        }
        UNROLL
        for (int n = 0; n < keys / 16; n++) {
          uint32_t fragment[4];
          ldmatrix_x4(fragment, Tile::along(K_lane, i) + n * 16 * Tile::row_bytes);
          UNROLL
          for (int r = 0; r < row_tiles; r++) {
            mma_m16n8k16(s[r][2 * n], fragment_q[r][i], fragment[0], fragment[2]);
            mma_m16n8k16(s[r][2 * n + 1], fragment_q[r][i], fragment[1], fragment[3]);
          }
        }
      }
    }
    if (key_tile > 0) fetch_tile<d, keys>(K + (buffer ^ 1) * tile_bytes, k, stride, k0 - keys, T);
    cp_async_commit();
    if (sees) {
      // Masking by k <= q hides keys at T and beyond too.
      if (k0 + keys - 1 > warp_q0) {
        UNROLL
        for (int r = 0; r < row_tiles; r++) {
          UNROLL
          for (int n = 0; n < keys / 8; n++) {
            UNROLL
            for (int e = 0; e < 4; e++)
              if (k0 + 8 * n + 2 * t + e % 2 > warp_q0 + 16 * r + g + 8 * (e / 2)) s[r][n][e] = -INFINITY;
          }
        }
      }
      UNROLL
      for (int r = 0; r < row_tiles; r++) softmax_step<d, keys>(s[r], o[r], row_max[r], row_sum[r], scale_log2);
    }

    cp_async_wait<1>();  // V; the next K may still be on its way
    __syncthreads();
    if (sees) add_product<d, row_tiles, keys>(o, s, V + lane_at);
  }

  // Both K buffers are free: the last barrier came after the last use of K. Each warp stages its rows in its part.
  UNROLL
  for (int r = 0; r < row_tiles; r++) {
    float inverse[2];
    UNROLL
    for (int half = 0; half < 2; half++) {
      float sum = row_sum[r][half];
      sum += __shfl_xor_sync(all_lanes, sum, 1);
      sum += __shfl_xor_sync(all_lanes, sum, 2);
      inverse[half] = 1.0f / sum;
      const int row = warp_q0 + 16 * r + 8 * half + g;
      if (t == 0 && row < T)
        lse[static_cast<int64_t>(bh) * T + row] =
            add_rn(mul_rn(row_max[r][half], scale_log2), log2f(sum)) * 0.693147181f;
    }
    store_rows<d>(out + static_cast<int64_t>(b) * T * C + h * d, C, warp_q0 + 16 * r, T, o[r], inverse[0], inverse[1],
                  smem + warp * 16 * Tile::row_bytes);
  }
}

template <int d, int row_tiles, int keys, bool resident, int blocks>
void attention_forward_launch(bf16* out, float* lse, const bf16* qkv, int B, int T, int C, int NH,
                              cudaStream_t stream) {
  constexpr int queries = 16 * row_tiles * attention_warps;
  constexpr size_t bytes = (3 * keys + (resident ? 0 : queries)) * d * sizeof(bf16);
  const unsigned blocks_x = attention_blocks(B, NH, (static_cast<int64_t>(T) + queries - 1) / queries);
  launch(attention_forward_kernel<d, row_tiles, keys, resident, blocks>, blocks_x, attention_threads, bytes, stream,
         out, lse, qkv, B * NH, T, C, NH, 1.0f / std::sqrt(static_cast<float>(d)));
}

// out (B,T,C), lse (B,NH,T) from qkv (B,T,3C), as attention_forward. bf16 pointers: 16-byte aligned.
template <class floatX>
void attention_forward_cuda(floatX* out, float* lse, const floatX* qkv, int B, int T, int C, int NH,
                            cudaStream_t stream) {
  if constexpr (std::is_same_v<floatX, bf16>) {
    const auto run = [&](auto width) {
      constexpr AttentionTiles t = attention_width(width.value).forward;
      check_attention_pointers({out, qkv});
      attention_forward_launch<width.value, t.row_tiles, t.tile, t.resident, t.blocks>(out, lse, qkv, B, T, C, NH,
                                                                                       stream);
    };
    if (attention_with_tiles(C / NH, run)) return;
  }
  attention_forward_simple(out, lse, qkv, B, T, C, NH, stream);
}
