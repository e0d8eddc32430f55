// Causal attention forward in four steps, from the formula to the production kernel (kernels/attention_forward.cuh):
//   S = Q K^T / sqrt(d), P = softmax over keys k <= q, O = P V      per batch element and head, d = C / NH
//   out (B,T,NH,d) and lse (B,NH,T), the log of the sum of exponentials, from packed qkv (B,T,3,NH,d)
// All take the same arguments. scores is scratch that only the first uses, (B,NH,T,T) floats.
//
// There are 4 T^2 d / 2 operations a head on 8 T d bytes: at T = 1024 that is 256 operations a byte, so attention ought
// to be bound by arithmetic. Each step removes something that keeps it from there.
#pragma once
#include "kernels/attention.cuh"

namespace ladder {

template <class floatX>
struct AttentionArrays {
  floatX* out;        // (B,T,NH,d)
  float* lse;         // (B,NH,T)
  const floatX* qkv;  // (B,T,3,NH,d)
  float* scores;      // (B,NH,T,T)
  int B, T, C, NH;
  int d() const { return C / NH; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(d())); }
};

// --- Step 1: all scores in memory -----------------------------------------------------------------------------------
//
// One kernel a formula. The array of scores is what makes it slow, and impossible for long sequences: it has B NH T^2
// numbers (400 MB at B = 8, NH = 12, T = 1024, against 13 MB of output), written once, read and written by the softmax,
// read once more by the product with V. Never do this; here it shows what the rest is about.

// scores[q][k] for k <= q: a thread a score.
template <class floatX>
__global__ void attention_scores_kernel(float* scores, const floatX* qkv, int T, int C, int NH, float scale) {
  const int k = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), q = static_cast<int>(blockIdx.y);
  const int bh = static_cast<int>(blockIdx.z), d = C / NH;
  if (k > q) return;  // so k < T too
  const floatX* sequence = qkv + static_cast<size_t>(bh / NH) * T * 3 * C + (bh % NH) * d;
  const floatX* Q = sequence + static_cast<size_t>(q) * 3 * C;
  const floatX* K = sequence + static_cast<size_t>(k) * 3 * C + C;
  float sum = 0;
  for (int i = 0; i < d; i++) sum += to_float(Q[i]) * to_float(K[i]);
  scores[(static_cast<size_t>(bh) * T + q) * T + k] = sum * scale;
}
// A row of scores becomes a row of probabilities: a warp a row, three passes (maximum, sum, division).
template <class floatX>
__global__ void attention_softmax_kernel(floatX* scores, float* lse, int rows, int T) {
  const int row = static_cast<int>(blockIdx.x) * block_warps() + warp_index(), q = row % T;
  if (row >= rows) return;
  floatX* s = scores + static_cast<size_t>(row) * T;
  float max = -INFINITY, sum = 0;
  for (int k = lane_index(); k <= q; k += warp_size) max = fmaxf(max, s[k]);
  max = warp_max(max);
  for (int k = lane_index(); k <= q; k += warp_size) sum += expf(s[k] - max);
  sum = warp_sum(sum);
  for (int k = lane_index(); k <= q; k += warp_size) s[k] = expf(s[k] - max) / sum;
  if (lane_index() == 0) lse[row] = max + logf(sum);
}
// out[q][i]: a thread an element of the output.
template <class floatX>
__global__ void attention_values_kernel(floatX* out, const float* scores, const floatX* qkv, int T, int C, int NH) {
  const int q = static_cast<int>(blockIdx.x), bh = static_cast<int>(blockIdx.y), d = C / NH;
  const size_t head = static_cast<size_t>(bh % NH) * d, sequence = static_cast<size_t>(bh / NH) * T;
  const float* p = scores + (static_cast<size_t>(bh) * T + q) * T;
  for (int i = static_cast<int>(threadIdx.x); i < d; i += static_cast<int>(blockDim.x)) {
    float sum = 0;
    for (int k = 0; k <= q; k++) sum += p[k] * to_float(qkv[(sequence + k) * 3 * C + 2 * C + head + i]);
    store(out[(sequence + q) * C + head + i], sum);
  }
}
template <class floatX>
void attention_scores_in_memory(const AttentionArrays<floatX>& a, cudaStream_t stream) {
  const unsigned T = static_cast<unsigned>(a.T), heads = static_cast<unsigned>(a.B * a.NH);
  launch(attention_scores_kernel<floatX>, dim3((T + 63) / 64, T, heads), 64, 0, stream, a.scores, a.qkv, a.T, a.C, a.NH,
         a.scale());
  launch(attention_softmax_kernel<float>, blocks_for(static_cast<size_t>(heads) * T, 4), 4 * warp_size, 0, stream,
         a.scores, a.lse, a.B * a.NH * a.T, a.T);
  launch(attention_values_kernel<floatX>, dim3(T, heads), 64, 0, stream, a.out, a.scores, a.qkv, a.T, a.C, a.NH);
}

// --- Step 2: the online softmax -------------------------------------------------------------------------------------
//
// kernels/attention_simple.cuh, which the program takes for widths that have no kernel on tensor cores: a warp a query,
// which meets its keys 32 at a time and keeps only the maximum so far, the sum below it, and the output scaled to it.
// When a larger score comes, sum and output are scaled down by e^(old - new maximum). So scores exist 32 at a time, in
// registers, and no T^2 array anywhere (Milakov and Gimelshein, arXiv 1805.02867). But each warp reads all keys and
// values before it from the caches for one single query.
template <class floatX>
void attention_online(const AttentionArrays<floatX>& a, cudaStream_t stream) {
  attention_forward_simple(a.out, a.lse, a.qkv, a.B, a.T, a.C, a.NH, stream);
}

// --- Step 3: tiles in shared memory ---------------------------------------------------------------------------------
//
// A block takes flash_queries queries of a head and brings each tile of flash_keys keys and values into shared memory
// once for all of them (Dao et al., arXiv 2205.14135): 16 times fewer reads outside of the SM. Each warp owns four of
// the queries; within it a lane first is a key (scores), then columns of the output (product with V). Rows of K are one
// float longer than d: with d a multiple of 32 the 32 lanes, each at a row of its own, would otherwise all hit one
// bank. The products are still scalar: two loads from shared memory for each multiplication and addition, which bounds
// it.
inline constexpr int flash_queries = 16, flash_keys = 32, flash_warps = 4, flash_rows = flash_queries / flash_warps;
inline constexpr int flash_max_d = 128;  // as many columns as the lanes have registers for

template <class floatX>
__global__ void __launch_bounds__(flash_warps* warp_size)
    attention_flash_kernel(floatX* out, float* lse, const floatX* qkv, int T, int C, int NH, float scale) {
  SHARED_DYNAMIC(float, memory);
  const int d = C / NH, ld = d + 1, bh = static_cast<int>(blockIdx.y);
  const int q0 = static_cast<int>(blockIdx.x) * flash_queries;
  const int warp = warp_index(), lane = lane_index(), thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  float *Q = memory, *K = Q + flash_queries * ld, *V = K + flash_keys * ld;  // (queries, ld), (keys, ld), (keys, ld)
  const size_t head = static_cast<size_t>(bh % NH) * d, sequence = static_cast<size_t>(bh / NH) * T;

  for (int i = thread; i < flash_queries * d; i += threads) {
    const int row = i / d, column = i % d;
    Q[row * ld + column] =
        q0 + row < T ? to_float(qkv[(sequence + q0 + row) * 3 * C + head + column]) * scale : 0.0f;
  }
  float max[flash_rows], sum[flash_rows], o[flash_rows][flash_max_d / warp_size] = {};
  for (int r = 0; r < flash_rows; r++) max[r] = -INFINITY, sum[r] = 0;

  const int last_query = q0 + flash_queries < T ? q0 + flash_queries - 1 : T - 1;
  for (int k0 = 0; k0 <= last_query; k0 += flash_keys) {
    __syncthreads();  // all are done with the last tile
    for (int i = thread; i < flash_keys * d; i += threads) {
      const int row = i / d, column = i % d;
      const bool there = k0 + row < T;
      const floatX* from = qkv + (sequence + k0 + row) * 3 * C + head + column;
      K[row * ld + column] = there ? to_float(from[C]) : 0.0f;
      V[row * ld + column] = there ? to_float(from[2 * C]) : 0.0f;
    }
    __syncthreads();  // the tile is complete
    UNROLL
    for (int r = 0; r < flash_rows; r++) {
      const int row = warp * flash_rows + r, q = q0 + row;
      if (k0 > q) continue;  // sees nothing of this tile; the same for all lanes of the warp
      float score = 0;
      for (int i = 0; i < d; i++) score += Q[row * ld + i] * K[lane * ld + i];
      if (k0 + lane > q) score = -INFINITY;
      const float new_max = fmaxf(max[r], warp_max(score)), correction = expf(max[r] - new_max);
      const float p = expf(score - new_max);
      sum[r] = sum[r] * correction + warp_sum(p);
      max[r] = new_max;
      UNROLL
      for (int c = 0; c < flash_max_d / warp_size; c++) o[r][c] *= correction;
      for (int k = 0; k < flash_keys; k++) {
        const float p_k = __shfl_sync(all_lanes, p, k);
        UNROLL
        for (int c = 0; c < flash_max_d / warp_size; c++)
          if (c * warp_size + lane < d) o[r][c] += p_k * V[k * ld + c * warp_size + lane];
      }
    }
  }
  UNROLL
  for (int r = 0; r < flash_rows; r++) {
    const int q = q0 + warp * flash_rows + r;
    if (q >= T) continue;
    UNROLL
    for (int c = 0; c < flash_max_d / warp_size; c++)
      if (c * warp_size + lane < d) store(out[(sequence + q) * C + head + c * warp_size + lane], o[r][c] / sum[r]);
    if (lane == 0) lse[static_cast<size_t>(bh) * T + q] = max[r] + logf(sum[r]);
  }
}
// Precondition: d at most flash_max_d.
template <class floatX>
void attention_flash(const AttentionArrays<floatX>& a, cudaStream_t stream) {
  CHECK(a.d() <= flash_max_d, "heads of %d, at most %d", a.d(), flash_max_d);
  const size_t bytes = (flash_queries + 2 * flash_keys) * static_cast<size_t>(a.d() + 1) * sizeof(float);
  const dim3 grid(blocks_for(static_cast<size_t>(a.T), flash_queries), static_cast<unsigned>(a.B * a.NH));
  launch(attention_flash_kernel<floatX>, grid, flash_warps * warp_size, bytes, stream, a.out, a.lse, a.qkv, a.T, a.C,
         a.NH, a.scale());
}

// --- Step 4: tensor cores: the production kernel --------------------------------------------------------------------
//
// mma.sync multiplies 16x16 by 16x8 with one instruction of a warp: 4,096 operations where step 3 does 64 a warp and
// instruction. The rest of that file is what it takes to feed them: operands by ldmatrix from a swizzled layout without
// bank conflicts, copies by cp.async while the last tile is multiplied, probabilities from accumulator to operand
// without leaving the registers. bf16 and d = 32, 64, 80, 96, 128 only; else the launcher takes step 2.
template <class floatX>
void attention_production(const AttentionArrays<floatX>& a, cudaStream_t stream) {
  attention_forward_cuda(a.out, a.lse, a.qkv, a.B, a.T, a.C, a.NH, stream);
}

template <class floatX>
struct AttentionVersion {
  const char* name;
  void (*run)(const AttentionArrays<floatX>&, cudaStream_t);
};
// From the slowest to the production kernel, which comes last.
template <class floatX>
inline constexpr AttentionVersion<floatX> attention_versions[] = {
    {"all scores in memory", attention_scores_in_memory<floatX>},
    {"online softmax, a warp a query", attention_online<floatX>},
    {"tiles in shared memory", attention_flash<floatX>},
    {"tensor cores (production)", attention_production<floatX>},
};

}  // namespace ladder
