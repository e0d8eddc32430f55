// GELU in its tanh form (Hendrycks and Gimpel, arXiv 1606.08415):
//   0.5 x (1 + tanh(y)),  y = sqrt(2/pi) (x + 0.044715 x^3)
// computed as x * sigmoid(2y), the same function without the cancellation in 1 + tanh(y) where y is very negative.
#pragma once
#include "kernels/device.h"
#include "kernels/vector_math.h"
#include "mcf/bf16.h"

inline constexpr float gelu_2_sqrt_2_over_pi = 1.5957691216f;

inline float gelu(float x) { return x * sigmoid(gelu_2_sqrt_2_over_pi * (x + 0.044715f * x * x * x)); }
inline float gelu_slope(float x) {
  const float s = sigmoid(gelu_2_sqrt_2_over_pi * (x + 0.044715f * x * x * x));
  return s + x * s * (1.0f - s) * gelu_2_sqrt_2_over_pi * (1.0f + 3.0f * 0.044715f * x * x);
}

// out (n) = gelu(inp (n)); inp is the stored pre-activation, so that out can be computed again bit for bit.
template <class floatX>
void gelu_forward(floatX* out, const floatX* inp, size_t n, Device& device) {
  Scope scope("gelu_forward", device);
#pragma omp parallel for simd
  for (size_t i = 0; i < n; i++) store(out[i], gelu(to_float(inp[i])));
}

// d (n) *= gelu'(inp (n)), in place
template <class floatX>
void gelu_backward(floatX* d, const floatX* inp, size_t n, Device& device) {
  Scope scope("gelu_backward", device);
#pragma omp parallel for simd
  for (size_t i = 0; i < n; i++) store(d[i], to_float(d[i]) * gelu_slope(to_float(inp[i])));
}
