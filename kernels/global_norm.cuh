// The norm of the whole gradient: sqrt of the sum of squares over all blocks of grads.
//
// In double, since bf16 gradients above 1.8e19 overflow when squared in fp32; partial sums a block, added in an order
// that depends on the number of blocks only. Padded vocabulary rows count nothing, for they stay 0.
#pragma once
#include <cmath>
#include <vector>

#include "kernels/blocks.h"
#include "kernels/device.h"
#include "kernels/reduce.cuh"

// partial (n): the sum of squares of each of n blocks
template <class floatX>
void block_squares_cpu(double* partial, const floatX* grads, const Block* blocks, size_t n) {
#pragma omp parallel for schedule(static)
  for (size_t b = 0; b < n; b++) {
    const floatX* g = grads + blocks[b].begin;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < blocks[b].n; i++) sum += static_cast<double>(to_float(g[i])) * to_float(g[i]);
    partial[b] = sum;
  }
}
inline double norm_of_squares_cpu(const double* partial, size_t n) {
  double sum = 0;
  for (size_t b = 0; b < n; b++) sum += partial[b];
  return std::sqrt(sum);
}

// partial (blocks): the sum of squares of each. A thread block a block: 16 bytes a thread and load.
template <class floatX>
__global__ void __launch_bounds__(256) block_squares_kernel(double* partial, const floatX* grads, const Block* blocks) {
  SHARED(double, sums, [warp_size]);
  constexpr int width = lane_width<floatX>;
  const Block block = blocks[blockIdx.x];
  const floatX* g = grads + block.begin;
  const int n = static_cast<int>(block.n), whole = n / width * width, thread = static_cast<int>(threadIdx.x);
  double sum = 0;
  for (int i = thread * width; i < whole; i += 256 * width) {
    float x[width];
    load_run(x, g + i);
    UNROLL
    for (int j = 0; j < width; j++) sum += static_cast<double>(x[j]) * x[j];
  }
  if (whole + thread < n) sum += static_cast<double>(to_float(g[whole + thread])) * to_float(g[whole + thread]);
  sum = block_sum(sum, sums);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// norm: one thread block adds the partial sums of all blocks (of all ranks, where they share the work).
template <class floatX>
__global__ void __launch_bounds__(1024) norm_of_squares_kernel(double* norm, const double* partial, size_t blocks) {
  SHARED(double, sums, [warp_size]);
  double sum = 0;
  for (size_t b = threadIdx.x; b < blocks; b += 1024) sum += partial[b];
  sum = block_sum(sum, sums);
  if (threadIdx.x == 0) *norm = sqrt(sum);
}

// The two stages. blocks (n) and partial (n) lie on the device, grads 16-byte aligned.
template <class floatX>
void block_squares_cuda(double* partial, const floatX* grads, const Block* blocks, size_t n, cudaStream_t stream) {
  launch(block_squares_kernel<floatX>, static_cast<unsigned>(n), 256, 0, stream, partial, grads, blocks);
}
inline void norm_of_squares_cuda(double* norm, const double* partial, size_t n, cudaStream_t stream) {
  launch(norm_of_squares_kernel<double>, 1, 1024, 0, stream, norm, partial, n);
}

// norm (1), on the device. part: the blocks that this rank looks at. share(partial) completes the partial sums
// (blocks), on the device, with those of the other ranks, so that the norm has the same bits however the blocks are
// cut.
template <class floatX, class Share>
void global_norm(double* norm, const floatX* grads, const BlockList& blocks, const Part& part, Share&& share,
                 Device& device) {
  Scope scope("global_norm", device);
  const size_t all = blocks.host.size(), first = part.first_block, n = std::min(part.last_block, all) - first;
  double* partial = device.scratch<double>(0, all);
  if (device.is_cuda())
    block_squares_cuda(partial + first, grads, blocks.device + first, n, device.stream());
  else
    block_squares_cpu(partial + first, grads, blocks.host.data() + first, n);
  share(partial);
  if (device.is_cuda())
    norm_of_squares_cuda(norm, partial, all, device.stream());
  else
    *norm = norm_of_squares_cpu(partial, all);
}
