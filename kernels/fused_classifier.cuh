// Softmax, cross-entropy and their gradient in one pass over a row of logits.
//
// losses (rows) = -log softmax(logits)[target], nats. Where write_dlogits: logits (rows,Vp) become
// (softmax - onehot(target)) * dloss, and 0 in the padding V..Vp-1; else they stay. targets (rows), each in [0, V).
// The gradient of a loss that is not finite is NaN, so that the gradient's norm tells of both.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "kernels/device.h"
#include "kernels/reduce.cuh"
#include "kernels/vector_math.h"

template <class floatX>
void fused_classifier_cpu(float* losses, floatX* logits, const int* targets, float dloss, int rows, int V, int Vp,
                          bool write_dlogits) {
#pragma omp parallel for
  for (int r = 0; r < rows; r++) {
    floatX* x = logits + static_cast<size_t>(r) * Vp;
    float max = to_float(x[0]);
#pragma omp simd reduction(max : max)
    for (int v = 0; v < V; v++) max = to_float(x[v]) > max ? to_float(x[v]) : max;
    // Short fp32 sums added in double: beside the largest logit's 1, a flat tail of small terms would vanish.
    double total = 0;
    constexpr int chunk = 256;
    for (int v0 = 0; v0 < V; v0 += chunk) {
      const int end = std::min(V, v0 + chunk);
      float part = 0;
#pragma omp simd reduction(+ : part)
      for (int v = v0; v < end; v++) part += exp_poly(to_float(x[v]) - max);
      total += part;
    }
    const float sum = static_cast<float>(total);
    const int target = targets[r];
    const float logit = to_float(x[target]);
    losses[r] = std::log(sum) + max - logit;
    if (!write_dlogits) continue;
    const float drow = std::isfinite(losses[r]) ? dloss : NAN;
    const float scale = drow / sum, target_p = exp_poly(logit - max) / sum;
#pragma omp simd
    for (int v = 0; v < V; v++) store(x[v], exp_poly(to_float(x[v]) - max) * scale);
    store(x[target], (target_p - 1.0f) * drow);
    for (int v = V; v < Vp; v++) store(x[v], 0.0f);
  }
}

// A block a row, up to 1,024 threads. The first pass keeps a running maximum and the sum of exponentials below it, so
// that memory is read once; the second writes the gradient, backwards, since what was read last is still in the cache.
// A thread writes only what it has read itself, but for the target's logit, which all read before the barrier.
template <class floatX, int width>
__global__ void __launch_bounds__(1024) fused_classifier_kernel(float* losses, floatX* logits, const int* targets,
                                                                float dloss, int V, int Vp, bool write_dlogits) {
  SHARED(float, maxima, [warp_size]);
  SHARED(float, parts, [warp_size]);
  floatX* row = logits + static_cast<size_t>(blockIdx.x) * Vp;
  const int target = targets[blockIdx.x], begin = static_cast<int>(threadIdx.x) * width;
  const int stride = static_cast<int>(blockDim.x) * width;
  const float logit = to_float(row[target]);

  // -FLT_MAX and not -inf: exp(-inf - -inf) would be NaN where a thread has nothing but logits of -inf, or nothing.
  float max = -FLT_MAX, sum = 0;
  for (int v = begin; v < V; v += stride) {
    float x[width];
    load_run(x, row + v);
    float higher = max;
    UNROLL
    for (int j = 0; j < width; j++)
      if (v + j < V) higher = fmaxf(higher, x[j]);
    sum *= exp_gpu(max - higher);
    UNROLL
    for (int j = 0; j < width; j++)
      if (v + j < V) sum += exp_gpu(x[j] - higher);
    max = higher;
  }
  const float warp_maximum = warp_max(max);
  sum = warp_sum(sum * exp_gpu(max - warp_maximum));
  if (lane_index() == 0) {
    maxima[warp_index()] = warp_maximum;
    parts[warp_index()] = sum;
  }
  __syncthreads();
  const bool has_part = lane_index() < block_warps();
  const float part_maximum = has_part ? maxima[lane_index()] : -FLT_MAX;
  max = warp_max(part_maximum);
  sum = warp_sum(has_part ? parts[lane_index()] * exp_gpu(part_maximum - max) : 0.0f);
  const float loss = logf(sum) + max - logit;
  if (threadIdx.x == 0) losses[blockIdx.x] = loss;
  if (!write_dlogits) return;

  const float drow = fabsf(loss) <= FLT_MAX ? dloss : NAN, scale = drow / sum;
  if (begin >= Vp) return;
  for (int v = begin + (Vp - 1 - begin) / stride * stride; v >= 0; v -= stride) {
    float x[width];
    load_run(x, row + v);
    UNROLL
    for (int j = 0; j < width; j++) {
      const float e = exp_gpu(x[j] - max);
      const float d = v + j == target ? (e / sum - 1.0f) * drow : e * scale;
      x[j] = v + j < V ? d : 0.0f;
    }
    store_run(row + v, x);
  }
}

template <class floatX>
void fused_classifier_cuda(float* losses, floatX* logits, const int* targets, float dloss, int rows, int V, int Vp,
                           bool write_dlogits, cudaStream_t stream) {
  with_width<floatX>(
      Vp,
      [&]<int width>() {
        const unsigned threads = static_cast<unsigned>(std::min(1024, round_up((Vp + width - 1) / width, warp_size)));
        launch(fused_classifier_kernel<floatX, width>, static_cast<unsigned>(rows), threads, 0, stream, losses, logits,
               targets, dloss, V, Vp, write_dlogits);
      },
      logits);
}

template <class floatX>
void fused_classifier(float* losses, floatX* logits, const int* targets, float dloss, int rows, int V, int Vp,
                      bool write_dlogits, Device& device) {
  Scope scope("fused_classifier", device);
  if (device.is_cuda())
    return fused_classifier_cuda(losses, logits, targets, dloss, rows, V, Vp, write_dlogits, device.stream());
  fused_classifier_cpu(losses, logits, targets, dloss, rows, V, Vp, write_dlogits);
}

// sum (1) += losses (n). A block: threads in turn, then the threads in order.
template <class Sum>
__global__ void __launch_bounds__(1024) add_losses_kernel(Sum* sum, const float* losses, int n) {
  SHARED(double, parts, [warp_size]);
  double s = 0;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += 1024) s += losses[i];
  s = block_sum(s, parts);
  if (threadIdx.x == 0) *sum += s;
}

inline void add_losses(double* sum, const float* losses, int n, Device& device) {
  Scope scope("add_losses", device);
  if (device.is_cuda()) {
    launch(add_losses_kernel<double>, 1, 1024, 0, device.stream(), sum, losses, n);
    return;
  }
  double s = 0;
  for (int i = 0; i < n; i++) s += losses[i];
  *sum += s;
}
