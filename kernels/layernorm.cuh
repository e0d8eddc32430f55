// LayerNorm over the channels, alone and fused with the residual addition before it.
//   mean = sum(x) / C, rstd = 1 / sqrt(sum((x - mean)^2) / C + 1e-5), out = (x - mean) * rstd * weight + bias
#pragma once
#include <algorithm>
#include <cmath>

#include "kernels/column_sums.cuh"
#include "kernels/device.h"
#include "kernels/vector_math.h"

inline constexpr float layernorm_eps = 1e-5f;

// --- Forward: out (B,T,C), mean and rstd (B,T) from inp (B,T,C), weight and bias (C) --------------------------------

// One row on the CPU.
template <class floatX>
void layernorm_row_cpu(floatX* out, float* mean, float* rstd, const floatX* x, const floatX* weight, const floatX* bias,
                       int C) {
  float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
  for (int c = 0; c < C; c++) sum += to_float(x[c]);
  const float mu = sum / static_cast<float>(C);
#pragma omp simd reduction(+ : squares)
  for (int c = 0; c < C; c++) {
    const float d = to_float(x[c]) - mu;
    squares += d * d;
  }
  const float rs = 1.0f / std::sqrt(squares / static_cast<float>(C) + layernorm_eps);
#pragma omp simd
  for (int c = 0; c < C; c++) store(out[c], (to_float(x[c]) - mu) * rs * to_float(weight[c]) + to_float(bias[c]));
  *mean = mu;
  *rstd = rs;
}

template <class floatX>
void layernorm_forward_cpu(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                           const floatX* bias, int B, int T, int C) {
#pragma omp parallel for
  for (int r = 0; r < B * T; r++) {
    const size_t row = static_cast<size_t>(r) * C;
    layernorm_row_cpu(out + row, mean + r, rstd + r, inp + row, weight, bias, C);
  }
}

// residual (B,T,C) = inp1 + inp2; out, mean, rstd = layernorm of the residual as stored
template <class floatX>
void residual_layernorm_forward_cpu(floatX* residual, floatX* out, float* mean, float* rstd, const floatX* inp1,
                                    const floatX* inp2, const floatX* weight, const floatX* bias, int B, int T, int C) {
#pragma omp parallel for
  for (int r = 0; r < B * T; r++) {
    const size_t row = static_cast<size_t>(r) * C;
#pragma omp simd
    for (int c = 0; c < C; c++) store(residual[row + c], to_float(inp1[row + c]) + to_float(inp2[row + c]));
    layernorm_row_cpu(out + row, mean + r, rstd + r, residual + row, weight, bias, C);
  }
}

// Calls f(k, c) for the lane's runs of a row: run k starts at channel c. chunks > 0: at most that many, unrolled, so
// that arrays indexed by k stay in registers; 0: any number, and k is 0 always.
template <int width, int chunks, class F>
__device__ inline void for_row(int C, F&& f) {
  if constexpr (chunks > 0) {
    UNROLL
    for (int k = 0; k < chunks; k++) {
      const int c = (k * warp_size + lane_index()) * width;
      if (c < C) f(k, c);
    }
  } else {
    for (int c = lane_index() * width; c < C; c += warp_size * width) f(0, c);
  }
}

// A warp a row. The row stays in registers, chunks * width floats a lane; with chunks = 0 it is read again from the L1
// cache for each of the three passes. Registers at most 64 (128 for chunks = 8): 32 (16) warps an SM.
template <class floatX, int width, int chunks, bool with_residual>
__global__ void __launch_bounds__(256)
    layernorm_forward_kernel(floatX* residual, floatX* out, float* mean, float* rstd, const floatX* inp1,
                             const floatX* inp2, const floatX* weight, const floatX* bias, int rows, int C) {
  const int row = static_cast<int>(blockIdx.x) * block_warps() + warp_index();
  if (row >= rows) return;
  const size_t begin = static_cast<size_t>(row) * C;
  const floatX* stored = with_residual ? residual + begin : inp1 + begin;
  float x[chunks > 0 ? chunks : 1][width];
  float sum = 0, squares = 0;
  for_row<width, chunks>(C, [&](int k, int c) {
    load_run(x[k], inp1 + begin + c);
    if constexpr (with_residual) {
      float y[width];
      load_run(y, inp2 + begin + c);
      UNROLL
      for (int j = 0; j < width; j++) {
        floatX rounded;  // as backward will see it
        store(rounded, x[k][j] + y[j]);
        x[k][j] = to_float(rounded);
      }
      store_run(residual + begin + c, x[k]);
    }
    UNROLL
    for (int j = 0; j < width; j++) sum += x[k][j];
  });
  const float mu = warp_sum(sum) / static_cast<float>(C);
  for_row<width, chunks>(C, [&](int k, int c) {
    if constexpr (chunks == 0) load_run(x[k], stored + c);
    UNROLL
    for (int j = 0; j < width; j++) squares += (x[k][j] - mu) * (x[k][j] - mu);
  });
  const float rs = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(C) + layernorm_eps);
  for_row<width, chunks>(C, [&](int k, int c) {
    if constexpr (chunks == 0) load_run(x[k], stored + c);
    float w[width], b[width];
    load_run(w, weight + c);
    load_run(b, bias + c);
    UNROLL
    for (int j = 0; j < width; j++) w[j] = (x[k][j] - mu) * rs * w[j] + b[j];
    store_run(out + begin + c, w);
  });
  if (lane_index() == 0) {
    mean[row] = mu;
    rstd[row] = rs;
  }
}

template <class floatX, bool with_residual>
void launch_layernorm_forward(floatX* residual, floatX* out, float* mean, float* rstd, const floatX* inp1,
                              const floatX* inp2, const floatX* weight, const floatX* bias, int rows, int C,
                              cudaStream_t stream) {
  with_width<floatX>(
      C,
      [&]<int width>() {
        const auto run = [&]<int chunks>() {
          constexpr int warps = chunks == 8 ? 4 : 8;
          launch(layernorm_forward_kernel<floatX, width, chunks, with_residual>,
                 blocks_for(static_cast<size_t>(rows), warps), warps * warp_size, 0, stream, residual, out, mean, rstd,
                 inp1, inp2, weight, bias, rows, C);
        };
        const int needed = (C + warp_size * width - 1) / (warp_size * width);
        if (width == 1 || needed > 8)
          run.template operator()<0>();
        else if (needed > 4)
          run.template operator()<width == 1 ? 0 : 8>();
        else if (needed > 2)
          run.template operator()<width == 1 ? 0 : 4>();
        else
          run.template operator()<width == 1 ? 0 : 2>();
      },
      residual, out, inp1, inp2, weight, bias);
}

template <class floatX>
void layernorm_forward_cuda(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                            const floatX* bias, int B, int T, int C, cudaStream_t stream) {
  launch_layernorm_forward<floatX, false>(nullptr, out, mean, rstd, inp, nullptr, weight, bias, B * T, C, stream);
}
template <class floatX>
void residual_layernorm_forward_cuda(floatX* residual, floatX* out, float* mean, float* rstd, const floatX* inp1,
                                     const floatX* inp2, const floatX* weight, const floatX* bias, int B, int T, int C,
                                     cudaStream_t stream) {
  launch_layernorm_forward<floatX, true>(residual, out, mean, rstd, inp1, inp2, weight, bias, B * T, C, stream);
}

template <class floatX>
void layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                       const floatX* bias, int B, int T, int C, Device& device) {
  Scope scope("layernorm_forward", device);
  if (device.is_cuda()) return layernorm_forward_cuda(out, mean, rstd, inp, weight, bias, B, T, C, device.stream());
  layernorm_forward_cpu(out, mean, rstd, inp, weight, bias, B, T, C);
}
template <class floatX>
void residual_layernorm_forward(floatX* residual, floatX* out, float* mean, float* rstd, const floatX* inp1,
                                const floatX* inp2, const floatX* weight, const floatX* bias, int B, int T, int C,
                                Device& device) {
  Scope scope("residual_layernorm_forward", device);
  if (device.is_cuda())
    return residual_layernorm_forward_cuda(residual, out, mean, rstd, inp1, inp2, weight, bias, B, T, C,
                                           device.stream());
  residual_layernorm_forward_cpu(residual, out, mean, rstd, inp1, inp2, weight, bias, B, T, C);
}

// --- Backward: dinp (B,T,C) += , dweight (C) +=, dbias (C) +=, from dout (B,T,C) and what forward saw and saved ------
//
// dinp is added to because the residual stream's gradient is there already.

template <class floatX>
void layernorm_backward_cpu(floatX* dinp, floatX* dweight, floatX* dbias, const floatX* dout, const floatX* inp,
                            const floatX* weight, const float* mean, const float* rstd, int B, int T, int C) {
  // For weight and bias threads share the channels: each sum runs over the rows in order, whatever the number of
  // threads.
  constexpr int strip = 64;
#pragma omp parallel for
  for (int c0 = 0; c0 < C; c0 += strip) {
    const int width = std::min(strip, C - c0);
    float dw[strip] = {}, db[strip] = {};
    for (int r = 0; r < B * T; r++) {
      const floatX* d = dout + static_cast<size_t>(r) * C + c0;
      const floatX* x = inp + static_cast<size_t>(r) * C + c0;
      const float mu = mean[r], rs = rstd[r];
#pragma omp simd
      for (int c = 0; c < width; c++) {
        dw[c] += to_float(d[c]) * ((to_float(x[c]) - mu) * rs);
        db[c] += to_float(d[c]);
      }
    }
#pragma omp simd
    for (int c = 0; c < width; c++) {
      store(dweight[c0 + c], to_float(dweight[c0 + c]) + dw[c]);
      store(dbias[c0 + c], to_float(dbias[c0 + c]) + db[c]);
    }
  }
#pragma omp parallel for
  for (int r = 0; r < B * T; r++) {
    const floatX* d = dout + static_cast<size_t>(r) * C;
    const floatX* x = inp + static_cast<size_t>(r) * C;
    floatX* dx = dinp + static_cast<size_t>(r) * C;
    const float mu = mean[r], rs = rstd[r];
    float sum = 0, sum_norm = 0;
#pragma omp simd reduction(+ : sum, sum_norm)
    for (int c = 0; c < C; c++) {
      const float dnorm = to_float(weight[c]) * to_float(d[c]);
      sum += dnorm;
      sum_norm += dnorm * ((to_float(x[c]) - mu) * rs);
    }
    sum /= static_cast<float>(C);
    sum_norm /= static_cast<float>(C);
#pragma omp simd
    for (int c = 0; c < C; c++) {
      const float dnorm = to_float(weight[c]) * to_float(d[c]);
      store(dx[c], to_float(dx[c]) + (dnorm - sum - (to_float(x[c]) - mu) * rs * sum_norm) * rs);
    }
  }
}

// How a block shares a row: its threads own runs of channels, `chunks` each. A column's sums over the rows then stay in
// its owner's registers, and every array is read once. Between two barriers a block takes layernorm_backward_rows rows.
inline constexpr int layernorm_backward_max_threads = 512;  // so 128 registers each
template <int width>
inline constexpr int layernorm_backward_max_chunks = width == 1 ? 16 : 32 / width;
template <int chunks>
inline constexpr int layernorm_backward_rows = chunks < 4 ? 4 / chunks : 1;

// partial (blocks,2,C): the sums for dweight and dbias over the rows that the block took.
// A row needs two sums over its channels: each warp leaves its parts for all rows of the step, then after one barrier
// everyone adds them up. Steps alternate between two places, so one barrier a step is enough. What a thread has read it
// keeps for behind the barrier; of the longest rows (chunks = 4 and more) it reads it again, for want of registers.
template <class floatX, int width, int chunks>
__global__ void __launch_bounds__(layernorm_backward_max_threads)
    layernorm_backward_kernel(floatX* dinp, float* partial, const floatX* dout, const floatX* inp, const floatX* weight,
                              const float* mean, const float* rstd, int rows, int C) {
  constexpr int step = layernorm_backward_rows<chunks>;
  constexpr bool keep = chunks < 4;
  SHARED(float, sums, [2][step][2][warp_size]);
  const int warp = warp_index(), lane = lane_index(), warps = block_warps(), threads = static_cast<int>(blockDim.x);
  const auto channel = [&](int k) { return (k * threads + static_cast<int>(threadIdx.x)) * width; };
  float dw[chunks][width] = {}, db[chunks][width] = {};
  int place = 0;
  for (int first = static_cast<int>(blockIdx.x) * step; first < rows; first += static_cast<int>(gridDim.x) * step) {
    Packed<floatX, width> d[step][keep ? chunks : 1], x[step][keep ? chunks : 1];
    float mu[step] = {}, rs[step] = {};
    const auto read = [&](int i, int k) {
      const size_t at = static_cast<size_t>(first + i) * C + channel(k);
      d[i][keep ? k : 0] = load_packed<width>(dout + at);
      x[i][keep ? k : 0] = load_packed<width>(inp + at);
    };
    UNROLL
    for (int i = 0; i < step; i++) {
      const int row = first + i;
      if (row >= rows) continue;
      mu[i] = mean[row], rs[i] = rstd[row];
      if constexpr (keep) UNROLL
      for (int k = 0; k < chunks; k++)
        if (channel(k) < C) read(i, k);
    }
    UNROLL
    for (int i = 0; i < step; i++) {
      float sum = 0, sum_norm = 0;
      if (first + i < rows) {
        UNROLL
        for (int k = 0; k < chunks; k++) {
          if (channel(k) >= C) continue;
          if constexpr (!keep) read(i, k);
          float w[width];
          load_run(w, weight + channel(k));
          UNROLL
          for (int j = 0; j < width; j++) {
            const float g = to_float(d[i][keep ? k : 0].v[j]),
                        norm = (to_float(x[i][keep ? k : 0].v[j]) - mu[i]) * rs[i];
            dw[k][j] += g * norm;
            db[k][j] += g;
            sum += w[j] * g;
            sum_norm += w[j] * g * norm;
          }
        }
      }
      sum = warp_sum(sum);
      sum_norm = warp_sum(sum_norm);
      if (lane == 0) {
        sums[place][i][0][warp] = sum;
        sums[place][i][1][warp] = sum_norm;
      }
    }
    __syncthreads();
    UNROLL
    for (int i = 0; i < step; i++) {
      const int row = first + i;
      if (row >= rows) continue;
      float sum = 0, sum_norm = 0;
      for (int k = 0; k < warps; k++) {
        sum += sums[place][i][0][k];
        sum_norm += sums[place][i][1][k];
      }
      sum /= static_cast<float>(C);
      sum_norm /= static_cast<float>(C);
      UNROLL
      for (int k = 0; k < chunks; k++) {
        const int c = channel(k);
        if (c >= C) continue;
        if constexpr (!keep) read(i, k);
        float w[width], dx[width];
        load_run(w, weight + c);
        load_run(dx, dinp + static_cast<size_t>(row) * C + c);
        UNROLL
        for (int j = 0; j < width; j++) {
          const float norm = (to_float(x[i][keep ? k : 0].v[j]) - mu[i]) * rs[i];
          dx[j] += (w[j] * to_float(d[i][keep ? k : 0].v[j]) - sum - norm * sum_norm) * rs[i];
        }
        store_run(dinp + static_cast<size_t>(row) * C + c, dx);
      }
    }
    place ^= 1;
  }
  UNROLL
  for (int k = 0; k < chunks; k++) {
    const int c = channel(k);
    if (c >= C) continue;
    float* to = partial + static_cast<size_t>(blockIdx.x) * 2 * C + c;
    store_run(to, dw[k]);
    store_run(to + C, db[k]);
  }
}

// Blocks, which is groups of partial sums: enough for 3 to 6 warps on each of a large GPU's 528 schedulers, and a
// function of the sizes only, so that every GPU gives the same bits.
inline int layernorm_backward_blocks(int rows, int threads) {
  return std::min((rows + 3) / 4, std::max(128, 49152 / threads));
}
// Floats of scratch that layernorm_backward_cuda needs.
inline size_t layernorm_backward_scratch(int rows, int C) {
  return static_cast<size_t>(layernorm_backward_blocks(rows, warp_size)) * 2 * C;
}

template <class floatX>
void layernorm_backward_cuda(floatX* dinp, floatX* dweight, floatX* dbias, const floatX* dout, const floatX* inp,
                             const floatX* weight, const float* mean, const float* rstd, float* scratch, int B, int T,
                             int C, cudaStream_t stream) {
  const int rows = B * T;
  int blocks = 0;
  with_width<floatX>(
      C,
      [&]<int width>() {
        const int runs = (C + width - 1) / width;
        const auto run = [&]<int chunks>() {
          const int threads = round_up((runs + chunks - 1) / chunks, warp_size);
          blocks = layernorm_backward_blocks(rows, threads);
          launch(layernorm_backward_kernel<floatX, width, chunks>, static_cast<unsigned>(blocks),
                 static_cast<unsigned>(threads), 0, stream, dinp, scratch, dout, inp, weight, mean, rstd, rows, C);
        };
        const auto fits = [&]<int chunks>() {
          if constexpr (chunks <= layernorm_backward_max_chunks<width>) {
            if (blocks || runs > chunks * layernorm_backward_max_threads) return;
            run.template operator()<chunks>();
          }
        };
        fits.template operator()<1>(), fits.template operator()<2>(), fits.template operator()<4>();
        fits.template operator()<8>(), fits.template operator()<16>();
        if (!blocks)
          RUN_ERROR("LayerNorm on a GPU: %d channels, at most %d; more if their number is a multiple of %d", C,
                    layernorm_backward_max_chunks<width> * layernorm_backward_max_threads * width, lane_width<floatX>);
      },
      dinp, dout, inp, weight, scratch);
  add_partial_sums_cuda(dweight, dbias, scratch, blocks, C, stream);
}

template <class floatX>
void layernorm_backward(floatX* dinp, floatX* dweight, floatX* dbias, const floatX* dout, const floatX* inp,
                        const floatX* weight, const float* mean, const float* rstd, int B, int T, int C,
                        Device& device) {
  Scope scope("layernorm_backward", device);
  if (device.is_cuda()) {
    float* scratch = device.scratch<float>(0, layernorm_backward_scratch(B * T, C));
    return layernorm_backward_cuda(dinp, dweight, dbias, dout, inp, weight, mean, rstd, scratch, B, T, C,
                                   device.stream());
  }
  layernorm_backward_cpu(dinp, dweight, dbias, dout, inp, weight, mean, rstd, B, T, C);
}
