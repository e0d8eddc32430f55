// Sums over the rows of a matrix, for the gradients of biases and LayerNorm parameters: on a GPU in two stages with a
// fixed order, without atomics. Groups of rows leave fp32 partial sums, then these are added up group by group.
#pragma once
#include "kernels/reduce.cuh"

// out (n) += the sums over groups of partial (groups, row_stride), columns first..first+n. blockIdx.y picks one of two
// outputs, the second from column n on. A block adds 32 columns: thread row y the groups y, y + 8, ..., then the eight
// in order, and rounds once.
template <class floatX>
__global__ void __launch_bounds__(256)
    add_partial_sums_kernel(floatX* out0, floatX* out1, const float* partial, int groups, int n) {
  SHARED(float, sums, [8][warp_size]);
  const int c = static_cast<int>(blockIdx.x) * warp_size + lane_index(), y = warp_index();
  const size_t stride = static_cast<size_t>(n) * gridDim.y, column = static_cast<size_t>(n) * blockIdx.y + c;
  float sum = 0;
  if (c < n)
    for (int g = y; g < groups; g += 8) sum += partial[g * stride + column];
  sums[y][lane_index()] = sum;
  __syncthreads();
  if (y != 0 || c >= n) return;
  sum = 0;
  UNROLL
  for (int k = 0; k < 8; k++) sum += sums[k][lane_index()];
  floatX* out = (blockIdx.y ? out1 : out0) + c;
  store(*out, to_float(*out) + sum);
}

// out0 (n) += sums of partial (groups, n); with out1: partial is (groups, 2, n) and out1 gets the second halves.
template <class floatX>
void add_partial_sums_cuda(floatX* out0, floatX* out1, const float* partial, int groups, int n, cudaStream_t stream) {
  launch(add_partial_sums_kernel<floatX>, dim3(blocks_for(static_cast<size_t>(n), warp_size), out1 ? 2 : 1), 256, 0,
         stream, out0, out1, partial, groups, n);
}

// partial (groups,OC): sums over rows_per_group rows of dout (rows,OC). A thread owns `width` columns: a warp reads 512
// bytes of a row, the eight warps of a block eight rows at a time, and their sums are added in order.
template <class floatX, int width>
__global__ void __launch_bounds__(256)
    column_sums_kernel(float* partial, const floatX* dout, int rows, int rows_per_group, int OC) {
  constexpr int stride = warp_size + warp_size / width;  // no bank is met twice, neither here nor there
  SHARED(float, sums, [8][stride * width]);
  const int lane = lane_index(), y = warp_index();
  const int c = (static_cast<int>(blockIdx.x) * warp_size + lane) * width;
  const int begin = static_cast<int>(blockIdx.y) * rows_per_group, end = std::min(rows, begin + rows_per_group);
  float sum[width] = {};
  if (c < OC) {
    constexpr int ahead = 4;  // rows in flight
    for (int r = begin + y; r < end; r += 8 * ahead) {
      float d[ahead][width] = {};
      UNROLL
      for (int a = 0; a < ahead; a++)
        if (r + 8 * a < end) load_run(d[a], dout + static_cast<size_t>(r + 8 * a) * OC + c);
      UNROLL
      for (int a = 0; a < ahead; a++) UNROLL
      for (int j = 0; j < width; j++) sum[j] += d[a][j];
    }
  }
  UNROLL
  for (int j = 0; j < width; j++) sums[y][j * stride + lane] = sum[j];
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < warp_size * width; i += 256) {
    const int column = static_cast<int>(blockIdx.x) * warp_size * width + i;
    if (column >= OC) return;
    float all = 0;
    UNROLL
    for (int k = 0; k < 8; k++) all += sums[k][i % width * stride + i / width];
    partial[static_cast<size_t>(blockIdx.y) * OC + column] = all;
  }
}

// At most 128 groups of at least 64 rows: a function of the rows only, so that every GPU gives the same bits.
inline int column_sum_groups(int rows) { return std::min(128, (rows + 63) / 64); }
inline size_t bias_backward_scratch(int rows, int OC) { return static_cast<size_t>(column_sum_groups(rows)) * OC; }

// dbias (OC) += dout (rows,OC) summed over the rows. scratch: bias_backward_scratch(rows, OC) floats.
template <class floatX>
void bias_backward_cuda(floatX* dbias, const floatX* dout, float* scratch, int rows, int OC, cudaStream_t stream) {
  const int groups = column_sum_groups(rows), rows_per_group = (rows + groups - 1) / groups;
  with_width<floatX>(
      OC,
      [&]<int width>() {
        const dim3 grid(blocks_for(static_cast<size_t>(OC), warp_size * width), static_cast<unsigned>(groups));
        launch(column_sums_kernel<floatX, width>, grid, 256, 0, stream, scratch, dout, rows, rows_per_group, OC);
      },
      dout);
  add_partial_sums_cuda<floatX>(dbias, nullptr, scratch, groups, OC, stream);
}
