// GELU in its tanh form (Hendrycks and Gimpel, arXiv 1606.08415):
//   0.5 x (1 + tanh(y)),  y = sqrt(2/pi) (x + 0.044715 x^3)
// computed as x * sigmoid(2y), the same function without the cancellation in 1 + tanh(y) where y is very negative.
#pragma once
#include "kernels/device.h"
#include "kernels/reduce.cuh"
#include "kernels/vector_math.h"

inline constexpr float gelu_2_sqrt_2_over_pi = 1.5957691216f;

__host__ __device__ inline float gelu_argument(float x) { return gelu_2_sqrt_2_over_pi * (x + 0.044715f * x * x * x); }
// gelu'(x) where x lies within +-50, beyond which the slope is 0 or 1 in fp32 and x^2 might overflow. e: exp(-2y),
// which CPU and GPU compute each in its way. With s = 1 / (1 + e), 1 - s = e * s does not cancel.
__host__ __device__ inline float gelu_slope_range(float x) { return x < -50.0f ? -50.0f : (x > 50.0f ? 50.0f : x); }
__host__ __device__ inline float gelu_slope(float x, float e) {
  e = e > 1e30f ? 1e30f : e;  // as large, and e * s stays a number
  const float s = 1.0f / (1.0f + e);
  return s + x * s * (e * s) * gelu_2_sqrt_2_over_pi * (1.0f + 3.0f * 0.044715f * x * x);
}
inline float gelu(float x) { return x * sigmoid(gelu_argument(x)); }
inline float gelu_slope(float x) {
  x = gelu_slope_range(x);
  return gelu_slope(x, exp_poly(-gelu_argument(x)));
}
__device__ inline float gelu_slope_gpu(float x) {
  x = gelu_slope_range(x);
  return gelu_slope(x, exp_gpu(-gelu_argument(x)));
}

// --- out (n) = gelu(inp (n)) ----------------------------------------------------------------------------------------
//
// inp is the stored pre-activation, so that out can be computed again bit for bit.

template <class floatX>
void gelu_forward_cpu(floatX* out, const floatX* inp, size_t n) {
#pragma omp parallel for simd
  for (size_t i = 0; i < n; i++) store(out[i], gelu(to_float(inp[i])));
}

template <class floatX, int width>
__global__ void __launch_bounds__(256) gelu_forward_kernel(floatX* out, const floatX* inp, size_t n) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * width;
  if (i + width <= n) {
    float x[width];
    load_run(x, inp + i);
    UNROLL
    for (int j = 0; j < width; j++) x[j] *= sigmoid_gpu(gelu_argument(x[j]));
    store_run(out + i, x);
  } else {
    for (size_t j = i; j < n; j++) {
      const float x = to_float(inp[j]);
      store(out[j], x * sigmoid_gpu(gelu_argument(x)));
    }
  }
}

template <class floatX>
void gelu_forward_cuda(floatX* out, const floatX* inp, size_t n, cudaStream_t stream) {
  with_width<floatX>(
      0,
      [&]<int width>() {
        launch(gelu_forward_kernel<floatX, width>, blocks_for(n, 256 * width), 256, 0, stream, out, inp, n);
      },
      out, inp);
}

template <class floatX>
void gelu_forward(floatX* out, const floatX* inp, size_t n, Device& device) {
  Scope scope("gelu_forward", device);
  if (device.is_cuda()) return gelu_forward_cuda(out, inp, n, device.stream());
  gelu_forward_cpu(out, inp, n);
}

// --- d (n) *= gelu'(inp (n)), in place ------------------------------------------------------------------------------

template <class floatX>
void gelu_backward_cpu(floatX* d, const floatX* inp, size_t n) {
#pragma omp parallel for simd
  for (size_t i = 0; i < n; i++) store(d[i], to_float(d[i]) * gelu_slope(to_float(inp[i])));
}

template <class floatX, int width>
__global__ void __launch_bounds__(256) gelu_backward_kernel(floatX* d, const floatX* inp, size_t n) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * width;
  if (i + width <= n) {
    float x[width], g[width];
    load_run(x, inp + i);
    load_run(g, d + i);
    UNROLL
    for (int j = 0; j < width; j++) g[j] *= gelu_slope_gpu(x[j]);
    store_run(d + i, g);
  } else {
    for (size_t j = i; j < n; j++) {
      const float x = to_float(inp[j]);
      store(d[j], to_float(d[j]) * gelu_slope_gpu(x));
    }
  }
}

template <class floatX>
void gelu_backward_cuda(floatX* d, const floatX* inp, size_t n, cudaStream_t stream) {
  with_width<floatX>(
      0,
      [&]<int width>() {
        launch(gelu_backward_kernel<floatX, width>, blocks_for(n, 256 * width), 256, 0, stream, d, inp, n);
      },
      d, inp);
}

template <class floatX>
void gelu_backward(floatX* d, const floatX* inp, size_t n, Device& device) {
  Scope scope("gelu_backward", device);
  if (device.is_cuda()) return gelu_backward_cuda(d, inp, n, device.stream());
  gelu_backward_cpu(d, inp, n);
}
