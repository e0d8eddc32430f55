// LayerNorm forward in three steps, from the formula to the production kernel (kernels/layernorm.cuh). All compute
//   mean = sum(x) / C, rstd = 1 / sqrt(sum((x - mean)^2) / C + 1e-5), out = (x - mean) * rstd * weight + bias
// of out (rows,C), mean and rstd (rows) from inp (rows,C), weight and bias (C), and take the same arguments.
//
// It does 8 operations an element and moves 4 bytes (bf16, in and out), where a GPU can do some 10 operations in the
// time that a byte takes: what counts is how well each version keeps the memory busy.
#pragma once
#include "kernels/layernorm.cuh"

namespace ladder {

// --- Step 1: a thread a row -----------------------------------------------------------------------------------------
//
// The CPU's loop, one row a thread. Right, and slow for two reasons. The 32 threads of a warp read the same column of
// 32 rows: each load touches 32 sectors of 32 bytes and uses 2 bytes of each. And a batch of 8,192 rows makes 8,192
// threads, where a large GPU wants a hundred thousand and more to hide the time that memory takes to answer.
template <class floatX>
__global__ void layernorm_thread_a_row_kernel(floatX* out, float* mean, float* rstd, const floatX* inp,
                                              const floatX* weight, const floatX* bias, int rows, int C) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= rows) return;
  const floatX* x = inp + static_cast<size_t>(row) * C;
  float sum = 0, squares = 0;
  for (int c = 0; c < C; c++) sum += to_float(x[c]);
  const float mu = sum / static_cast<float>(C);
  for (int c = 0; c < C; c++) squares += (to_float(x[c]) - mu) * (to_float(x[c]) - mu);
  const float rs = 1.0f / sqrtf(squares / static_cast<float>(C) + layernorm_eps);
  for (int c = 0; c < C; c++)
    store(out[static_cast<size_t>(row) * C + c], (to_float(x[c]) - mu) * rs * to_float(weight[c]) + to_float(bias[c]));
  mean[row] = mu;
  rstd[row] = rs;
}
template <class floatX>
void layernorm_thread_a_row(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                            const floatX* bias, int rows, int C, cudaStream_t stream) {
  launch(layernorm_thread_a_row_kernel<floatX>, blocks_for(static_cast<size_t>(rows), 128), 128, 0, stream, out, mean,
         rstd, inp, weight, bias, rows, C);
}

// --- Step 2: a warp a row -------------------------------------------------------------------------------------------
//
// The lanes of a warp take neighbouring columns, so one load of the warp is 64 bytes side by side: every byte that
// moves is used. There are 32 times as many threads, and each adds up C/32 elements. What the lanes have summed is
// joined by shuffles, from register to register, without shared memory and without a barrier: five steps of x +=
// shfl_xor(x). The sums now have another order than on the CPU, so results agree within rounding, no longer in every
// bit.
template <class floatX>
__global__ void layernorm_warp_a_row_kernel(floatX* out, float* mean, float* rstd, const floatX* inp,
                                            const floatX* weight, const floatX* bias, int rows, int C) {
  const int row = static_cast<int>(blockIdx.x) * block_warps() + warp_index();
  if (row >= rows) return;
  const floatX* x = inp + static_cast<size_t>(row) * C;
  float sum = 0, squares = 0;
  for (int c = lane_index(); c < C; c += warp_size) sum += to_float(x[c]);
  const float mu = warp_sum(sum) / static_cast<float>(C);
  for (int c = lane_index(); c < C; c += warp_size) squares += (to_float(x[c]) - mu) * (to_float(x[c]) - mu);
  const float rs = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(C) + layernorm_eps);
  for (int c = lane_index(); c < C; c += warp_size)
    store(out[static_cast<size_t>(row) * C + c], (to_float(x[c]) - mu) * rs * to_float(weight[c]) + to_float(bias[c]));
  if (lane_index() == 0) {
    mean[row] = mu;
    rstd[row] = rs;
  }
}
template <class floatX>
void layernorm_warp_a_row(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                          const floatX* bias, int rows, int C, cudaStream_t stream) {
  launch(layernorm_warp_a_row_kernel<floatX>, blocks_for(static_cast<size_t>(rows), 8), 8 * warp_size, 0, stream, out,
         mean, rstd, inp, weight, bias, rows, C);
}

// --- Step 3: 16 bytes a lane, the row in registers: the production kernel -------------------------------------------
//
// A lane loads 16 bytes with one instruction (8 bf16), so an eighth of the loads keeps the same number of bytes on
// their way; and the row stays in registers between the three passes, so that each element is read once, not three
// times out of the L1 cache. Rows whose length or address is no multiple of 16 bytes take the form of step 2.
template <class floatX>
void layernorm_production(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                          const floatX* bias, int rows, int C, cudaStream_t stream) {
  layernorm_forward_cuda(out, mean, rstd, inp, weight, bias, rows, 1, C, stream);
}

template <class floatX>
struct LayerNormVersion {
  const char* name;
  void (*run)(floatX*, float*, float*, const floatX*, const floatX*, const floatX*, int, int, cudaStream_t);
};
// From the slowest to the production kernel, which comes last.
template <class floatX>
inline constexpr LayerNormVersion<floatX> layernorm_versions[] = {
    {"thread a row", layernorm_thread_a_row<floatX>},
    {"warp a row", layernorm_warp_a_row<floatX>},
    {"16-byte loads (production)", layernorm_production<floatX>},
};

}  // namespace ladder
