// Attention backward on tensor cores (bf16), after FlashAttention-2 (Dao, arXiv 2307.08691), in three kernels without
// atomics or workspace, so that the result is the same bits every time:
//   dqkv (B,T,3,NH,d) from dout, out (B,T,NH,d), lse (B,NH,T) fp32 and qkv (B,T,3,NH,d); keys k <= q only
//   1. D (B,NH,T) fp32 = rowsum(dO * O)
//   2. dQ: a block owns query rows and goes along the keys.   P = exp(S - lse), dS = P * (dO V^T - D), dQ = dS K
//   3. dK, dV: a block owns key rows and goes along the queries, on transposed scores S^T = K Q^T, so that P^T and dS^T
//      leave the tensor core as the A operand of the next product.   dV = P^T dO, dK = dS^T Q
// That is 7 products where one fused kernel makes 5 and adds up dQ with atomics. No row needs to be seen whole, since
// the softmax is known from lse: a warp takes its scores 16 columns (or 32) at a time, and needs few registers.
//
// Rounding: S, dP and all sums in fp32; P and dS to bf16; dQ and dK times 1 / sqrt(d) at the end, then to bf16.
#pragma once
#include "kernels/attention_simple.cuh"
#include "kernels/attention_tiles.cuh"

// D, by as many lanes a row as it has chunks of 16 bytes, rounded up to a power of two.
__host__ __device__ constexpr int attention_D_lanes(int d) { return d <= 32 ? 4 : d <= 64 ? 8 : 16; }
template <int d>
__global__ void __launch_bounds__(256)
    attention_D_kernel(float* D, const bf16* dout, const bf16* out, int64_t rows, int T, int NH) {
  constexpr int chunks = d / 8, lanes = attention_D_lanes(d);
  static_assert(chunks <= lanes);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (256 / lanes) + threadIdx.x / lanes;  // in (B,NH,T)
  const int chunk = static_cast<int>(threadIdx.x % lanes);
  float sum = 0.0f;
  if (row < rows && chunk < chunks) {
    const int64_t bh = row / T, at = (bh / NH * T + row % T) * NH * d + bh % NH * d + chunk * 8;
    const Vec16<bf16> a = load16(dout + at), b = load16(out + at);
    UNROLL
    for (int i = 0; i < 8; i++) sum = fmaf(bf16_bits_to_float(a[i].bits), bf16_bits_to_float(b[i].bits), sum);
  }
  UNROLL
  for (int offset = lanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(all_lanes, sum, offset);
  if (row < rows && chunk == 0) D[row] = sum;
}

// s, dp (16 row_tiles, columns) = the warp's own rows times rows of two tiles, transposed: S and dP, or S^T and dP^T.
// The own rows are in registers a and da if resident; otherwise they are read from own and own_d, 16 of d at a time.
template <int d, int row_tiles, int columns, bool resident>
__device__ inline void score_products(float (&s)[row_tiles][columns / 8][4], float (&dp)[row_tiles][columns / 8][4],
                                      uint32_t (&a)[row_tiles][d / 16][4], uint32_t (&da)[row_tiles][d / 16][4],
                                      shared_address own, shared_address own_d, shared_address other,
                                      shared_address other_d) {
  using Tile = AttentionTile<d>;
  UNROLL
  for (int i = 0; i < d / 16; i++) {
    if constexpr (!resident) {
      UNROLL
      for (int r = 0; r < row_tiles; r++) {
        ldmatrix_x4(a[r][i], Tile::along(own, i) + r * 16 * Tile::row_bytes);
        ldmatrix_x4(da[r][i], Tile::along(own_d, i) + r * 16 * Tile::row_bytes);
      }
    }
    UNROLL
    for (int n = 0; n < columns / 16; n++) {
      uint32_t fragment[4], fragment_d[4];
      ldmatrix_x4(fragment, Tile::along(other, i) + n * 16 * Tile::row_bytes);
      ldmatrix_x4(fragment_d, Tile::along(other_d, i) + n * 16 * Tile::row_bytes);
      UNROLL
      for (int r = 0; r < row_tiles; r++) {
        mma_m16n8k16(s[r][2 * n], a[r][i], fragment[0], fragment[2]);
        mma_m16n8k16(s[r][2 * n + 1], a[r][i], fragment[1], fragment[3]);
        mma_m16n8k16(dp[r][2 * n], da[r][i], fragment_d[0], fragment_d[2]);
        mma_m16n8k16(dp[r][2 * n + 1], da[r][i], fragment_d[1], fragment_d[3]);
      }
    }
  }
}

// In blockIdx.x: head fastest, then query tiles from the last, which has the most keys, to the first.
template <int d, int row_tiles, int tile, int step, bool resident, int blocks>
__global__ void __launch_bounds__(attention_threads, blocks)
    attention_dQ_kernel(bf16* dqkv, const bf16* dout, const float* lse, const float* D, const bf16* qkv, int heads,
                        int T, int C, int NH, float scale) {
  using Tile = AttentionTile<d>;
  constexpr int warp_rows = 16 * row_tiles, queries = warp_rows * attention_warps;
  constexpr bool beside = queries <= tile;  // Q and dO fit in the second buffer while the first is filled
  constexpr shared_address own_bytes = queries * Tile::row_bytes, tile_bytes = tile * Tile::row_bytes;
  static_assert(tile % step == 0 && step % 16 == 0 && (!resident || queries <= 2 * tile) && 64 <= 2 * tile);
  SHARED_DYNAMIC(unsigned char, smem);  // K, V; K, V; Q and dO behind them, or in their place
  const shared_address KV = to_shared(smem);
  const shared_address Q = KV + (!resident ? 4 : beside ? 2 : 0) * tile_bytes, dO = Q + own_bytes;

  const int lane = static_cast<int>(threadIdx.x % warp_size), warp = static_cast<int>(threadIdx.x / warp_size);
  const int g = lane / 4, t = lane % 4;
  const int query_tiles = (T + queries - 1) / queries;
  const int bh = static_cast<int>(blockIdx.x) % heads, b = bh / NH, h = bh % NH;
  const int q0 = (query_tiles - 1 - static_cast<int>(blockIdx.x) / heads) * queries, warp_q0 = q0 + warp * warp_rows;
  const int stride = 3 * C;
  const int64_t sequence = static_cast<int64_t>(b) * T;
  const bf16* q = qkv + sequence * stride + h * d;
  const bf16 *k = q + C, *v = k + C;

  const int last_query = q0 + queries < T ? q0 + queries - 1 : T - 1;
  int key_tile = last_query / tile;
  uint32_t fragment_q[row_tiles][d / 16][4], fragment_do[row_tiles][d / 16][4];
  const auto own_to_registers = [&] {
    UNROLL
    for (int r = 0; r < row_tiles; r++) {
      load_rows<d>(fragment_q[r], Q, warp * warp_rows + 16 * r);
      load_rows<d>(fragment_do[r], dO, warp * warp_rows + 16 * r);
    }
  };
  fetch_tile<d, queries>(Q, q, stride, q0, T);
  fetch_tile<d, queries>(dO, dout + sequence * C + h * d, C, q0, T);
  cp_async_commit();
  if constexpr (resident && !beside) {
    cp_async_wait<0>();
    __syncthreads();
    own_to_registers();
    __syncthreads();
  }
  fetch_tile<d, tile>(KV, k, stride, key_tile * tile, T);
  fetch_tile<d, tile>(KV + tile_bytes, v, stride, key_tile * tile, T);
  cp_async_commit();
  if constexpr (resident && beside) {
    cp_async_wait<1>();
    __syncthreads();
    own_to_registers();
  }

  // Row 8 half + g of the warp. Rows at T and beyond: any finite number, their results are not stored.
  const float scale_log2 = scale * 1.44269504f;
  float row_lse[row_tiles][2], row_D[row_tiles][2];
  UNROLL
  for (int r = 0; r < row_tiles; r++) {
    UNROLL
    for (int half = 0; half < 2; half++) {
      const int row = warp_q0 + 16 * r + 8 * half + g;
      row_lse[r][half] = row < T ? lse[static_cast<int64_t>(bh) * T + row] * 1.44269504f : 0.0f;
      row_D[r][half] = row < T ? D[static_cast<int64_t>(bh) * T + row] : 0.0f;
    }
  }

  const shared_address lane_at = lane_offset<d>(), own_at = warp * warp_rows * Tile::row_bytes + lane_at;
  float dq[row_tiles][d / 8][4] = {};
  shared_address buffer = 0;
  for (; key_tile >= 0; key_tile--, buffer ^= 1) {
    const int k0 = key_tile * tile;
    cp_async_wait<0>();
    __syncthreads();  // this tile has arrived for all, and all have left the other buffer
    if (key_tile > 0) {
      const shared_address next = KV + (buffer ^ 1) * 2 * tile_bytes;
      fetch_tile<d, tile>(next, k, stride, k0 - tile, T);
      fetch_tile<d, tile>(next + tile_bytes, v, stride, k0 - tile, T);
    }
    cp_async_commit();

    // Steps whose first key no row of this warp sees are left out.
    for (int c = 0; c < tile && k0 + c < warp_q0 + warp_rows; c += step) {
      const shared_address K_at = KV + buffer * 2 * tile_bytes + c * Tile::row_bytes + lane_at,
                           V_at = K_at + tile_bytes;
      float s[row_tiles][step / 8][4] = {}, dp[row_tiles][step / 8][4] = {};
      score_products<d, row_tiles, step, resident>(s, dp, fragment_q, fragment_do, Q + own_at, dO + own_at, K_at, V_at);
      const bool masked = k0 + c + step - 1 > warp_q0;
      UNROLL
      for (int r = 0; r < row_tiles; r++) {
        UNROLL
        for (int n = 0; n < step / 8; n++) {
          UNROLL
          for (int e = 0; e < 4; e++) {
            const int half = e / 2;
            float p = exp2_approx(fmaf(s[r][n][e], scale_log2, -row_lse[r][half]));
            if (masked && k0 + c + 8 * n + 2 * t + e % 2 > warp_q0 + 16 * r + 8 * half + g) p = 0.0f;
            s[r][n][e] = p * (dp[r][n][e] - row_D[r][half]);
          }
        }
      }
      add_product<d, row_tiles, step>(dq, s, K_at);
    }
  }
  // The other buffer: left by all before the last barrier, and nothing is on its way to it.
  UNROLL
  for (int r = 0; r < row_tiles; r++)
    store_rows<d>(dqkv + sequence * stride + h * d, stride, warp_q0 + 16 * r, T, dq[r], scale, scale,
                  smem + buffer * 2 * tile_bytes + warp * 16 * Tile::row_bytes);
}

// In blockIdx.x: head fastest, then key tiles from the first, which is seen by the most queries, to the last.
template <int d, int row_tiles, int tile, int step, bool resident, int blocks>
__global__ void __launch_bounds__(attention_threads, blocks)
    attention_dKV_kernel(bf16* dqkv, const bf16* dout, const float* lse, const float* D, const bf16* qkv, int heads,
                         int T, int C, int NH, float scale) {
  using Tile = AttentionTile<d>;
  constexpr int warp_rows = 16 * row_tiles, keys = warp_rows * attention_warps;
  constexpr bool beside = keys <= tile;  // K and V fit in the second buffer while the first is filled
  constexpr shared_address own_bytes = keys * Tile::row_bytes, tile_bytes = tile * Tile::row_bytes;
  static_assert(tile % step == 0 && step % 16 == 0 && (!resident || keys <= 2 * tile) && 64 <= 2 * tile);
  static_assert(2 * tile <= attention_threads);
  SHARED_DYNAMIC(unsigned char, smem);  // Q, dO; Q, dO; K and V behind them, or in their place
  SHARED(float, stats, [2][2][tile]);   // of the queries of each buffer: lse * log2(e), and D
  const shared_address QdO = to_shared(smem);
  const shared_address K = QdO + (!resident ? 4 : beside ? 2 : 0) * tile_bytes, V = K + own_bytes;

  const int thread = static_cast<int>(threadIdx.x), lane = thread % warp_size, warp = thread / warp_size;
  const int g = lane / 4, t = lane % 4;
  const int bh = static_cast<int>(blockIdx.x) % heads, b = bh / NH, h = bh % NH;
  const int k0 = static_cast<int>(blockIdx.x) / heads * keys, warp_k0 = k0 + warp * warp_rows;
  const int stride = 3 * C;
  const int64_t sequence = static_cast<int64_t>(b) * T, stat = static_cast<int64_t>(bh) * T;
  const bf16* q = qkv + sequence * stride + h * d;
  const bf16* od = dout + sequence * C + h * d;

  // One number of a tile of queries for each of the first 2 * tile threads. Queries at T and beyond: Q and dO are zero
  // there, so that 0 gives P = 1 and dS = 0, and they add nothing.
  const auto load_stat = [&](int query_tile) {
    const int which = thread / tile, row = query_tile * tile + thread % tile;
    if (which > 1 || row >= T) return 0.0f;
    return which == 0 ? lse[stat + row] * 1.44269504f : D[stat + row];
  };

  uint32_t fragment_k[row_tiles][d / 16][4], fragment_v[row_tiles][d / 16][4];
  const auto own_to_registers = [&] {
    UNROLL
    for (int r = 0; r < row_tiles; r++) {
      load_rows<d>(fragment_k[r], K, warp * warp_rows + 16 * r);
      load_rows<d>(fragment_v[r], V, warp * warp_rows + 16 * r);
    }
  };
  fetch_tile<d, keys>(K, q + C, stride, k0, T);
  fetch_tile<d, keys>(V, q + 2 * C, stride, k0, T);
  cp_async_commit();
  if constexpr (resident && !beside) {
    cp_async_wait<0>();
    __syncthreads();
    own_to_registers();
    __syncthreads();
  }
  int query_tile = k0 / tile;
  fetch_tile<d, tile>(QdO, q, stride, query_tile * tile, T);
  fetch_tile<d, tile>(QdO + tile_bytes, od, C, query_tile * tile, T);
  cp_async_commit();
  if constexpr (resident && beside) {
    cp_async_wait<1>();
    __syncthreads();
    own_to_registers();
  }
  if (thread < 2 * tile) stats[0][thread / tile][thread % tile] = load_stat(query_tile);

  const shared_address lane_at = lane_offset<d>(), own_at = warp * warp_rows * Tile::row_bytes + lane_at;
  const float scale_log2 = scale * 1.44269504f;
  float dk[row_tiles][d / 8][4] = {}, dv[row_tiles][d / 8][4] = {};
  const int query_tiles = (T + tile - 1) / tile;
  shared_address buffer = 0;
  for (; query_tile < query_tiles; query_tile++, buffer ^= 1) {
    const int q0 = query_tile * tile;
    const bool more = query_tile + 1 < query_tiles;
    float next_stat = 0.0f;  // on its way while this tile is worked on
    cp_async_wait<0>();
    __syncthreads();  // this tile has arrived for all, and all have left the other buffer
    if (more) {
      const shared_address next = QdO + (buffer ^ 1) * 2 * tile_bytes;
      fetch_tile<d, tile>(next, q, stride, q0 + tile, T);
      fetch_tile<d, tile>(next + tile_bytes, od, C, q0 + tile, T);
      next_stat = load_stat(query_tile + 1);
    }
    cp_async_commit();

    for (int c = 0; c < tile; c += step) {
      if (q0 + c + step - 1 < warp_k0) continue;  // no query of this step sees a key of this warp
      const shared_address Q_at = QdO + buffer * 2 * tile_bytes + c * Tile::row_bytes + lane_at,
                           dO_at = Q_at + tile_bytes;
      float s[row_tiles][step / 8][4] = {}, dp[row_tiles][step / 8][4] = {};
      score_products<d, row_tiles, step, resident>(s, dp, fragment_k, fragment_v, K + own_at, V + own_at, Q_at, dO_at);
      const bool masked = q0 + c < warp_k0 + warp_rows - 1;
      UNROLL
      for (int n = 0; n < step / 8; n++) {
        UNROLL
        for (int e = 0; e < 4; e++) {
          const int column = c + 8 * n + 2 * t + e % 2;
          UNROLL
          for (int r = 0; r < row_tiles; r++) {
            float p = exp2_approx(fmaf(s[r][n][e], scale_log2, -stats[buffer][0][column]));
            if (masked && warp_k0 + 16 * r + 8 * (e / 2) + g > q0 + column) p = 0.0f;
            s[r][n][e] = p;
            dp[r][n][e] = p * (dp[r][n][e] - stats[buffer][1][column]);
          }
        }
      }
      add_product<d, row_tiles, step>(dv, s, dO_at);
      add_product<d, row_tiles, step>(dk, dp, Q_at);
    }
    // The next barrier is in front of its readers, the last one behind those of the numbers it replaces.
    if (more && thread < 2 * tile) stats[buffer ^ 1][thread / tile][thread % tile] = next_stat;
  }
  // The other buffer: left by all before the last barrier, and nothing is on its way to it.
  bf16* to = dqkv + sequence * stride + h * d;
  unsigned char* staging = smem + buffer * 2 * tile_bytes + warp * 16 * Tile::row_bytes;
  UNROLL
  for (int r = 0; r < row_tiles; r++) {
    store_rows<d>(to + C, stride, warp_k0 + 16 * r, T, dk[r], scale, scale, staging);
    store_rows<d>(to + 2 * C, stride, warp_k0 + 16 * r, T, dv[r], 1.0f, 1.0f, staging);
  }
}

// Both kernels take the same arguments: dqkv, dout, lse, D, qkv, heads, T, C, NH, scale.
template <int d, int row_tiles, int tile, int step, bool resident, int blocks>
void attention_dQ_launch(bf16* dqkv, const bf16* dout, const float* lse, const float* D, const bf16* qkv, int B, int T,
                         int C, int NH, cudaStream_t stream) {
  constexpr int queries = 16 * row_tiles * attention_warps;
  constexpr size_t bytes = (4 * tile + (resident ? 0 : 2 * queries)) * d * sizeof(bf16);
  launch(attention_dQ_kernel<d, row_tiles, tile, step, resident, blocks>,
         attention_blocks(B, NH, (static_cast<int64_t>(T) + queries - 1) / queries), attention_threads, bytes, stream,
         dqkv, dout, lse, D, qkv, B * NH, T, C, NH, 1.0f / std::sqrt(static_cast<float>(d)));
}
template <int d, int row_tiles, int tile, int step, bool resident, int blocks>
void attention_dKV_launch(bf16* dqkv, const bf16* dout, const float* lse, const float* D, const bf16* qkv, int B, int T,
                          int C, int NH, cudaStream_t stream) {
  constexpr int keys = 16 * row_tiles * attention_warps;
  constexpr size_t bytes = (4 * tile + (resident ? 0 : 2 * keys)) * d * sizeof(bf16);
  launch(attention_dKV_kernel<d, row_tiles, tile, step, resident, blocks>,
         attention_blocks(B, NH, (static_cast<int64_t>(T) + keys - 1) / keys), attention_threads, bytes, stream, dqkv,
         dout, lse, D, qkv, B * NH, T, C, NH, 1.0f / std::sqrt(static_cast<float>(d)));
}

// dqkv (B,T,3C) from dout (B,T,C) and what forward saw and made, as attention_backward. D (B,NH,T) is scratch. bf16
// pointers: 16-byte aligned.
template <class floatX>
void attention_backward_cuda(floatX* dqkv, const floatX* dout, const floatX* out, const float* lse, float* D,
                             const floatX* qkv, int B, int T, int C, int NH, cudaStream_t stream) {
  if constexpr (std::is_same_v<floatX, bf16>) {
    const auto run = [&](auto width) {
      constexpr int d = width.value;
      constexpr AttentionTiles q = attention_width(d).dQ, k = attention_width(d).dKV;
      check_attention_pointers({dqkv, dout, out, qkv});
      const int64_t rows = static_cast<int64_t>(B) * NH * T, threads = rows * attention_D_lanes(d);
      launch(attention_D_kernel<d>, attention_blocks(1, 1, (threads + 255) / 256), 256, 0, stream, D, dout, out, rows,
             T, NH);
      attention_dQ_launch<d, q.row_tiles, q.tile, q.step, q.resident, q.blocks>(dqkv, dout, lse, D, qkv, B, T, C, NH,
                                                                                stream);
      attention_dKV_launch<d, k.row_tiles, k.tile, k.step, k.resident, k.blocks>(dqkv, dout, lse, D, qkv, B, T, C, NH,
                                                                                 stream);
    };
    if (attention_with_tiles(C / NH, run)) return;
  }
  attention_backward_simple(dqkv, dout, out, lse, D, qkv, B, T, C, NH, stream);
}
