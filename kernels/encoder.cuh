// Token and position embedding.
#pragma once
#include "kernels/device.h"
#include "mcf/bf16.h"

// out (B,T,C) = wte (Vp,C)[tokens (B,T)] + wpe (max_T,C)[t]
template <class floatX>
void encoder_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T, int C,
                     Device& device) {
  Scope scope("encoder_forward", device);
#pragma omp parallel for
  for (int bt = 0; bt < B * T; bt++) {
    floatX* o = out + static_cast<size_t>(bt) * C;
    const floatX* e = wte + static_cast<size_t>(tokens[bt]) * C;
    const floatX* p = wpe + static_cast<size_t>(bt % T) * C;
#pragma omp simd
    for (int c = 0; c < C; c++) store(o[c], to_float(e[c]) + to_float(p[c]));
  }
}

// dwte (Vp,C) += dout rows by token; dwpe (max_T,C) += dout summed over B.
// dwte is fp32 scratch, which the classifier's contribution goes into as well before it is rounded once.
// Threads share the channels, not the rows: each sum runs over b, t in order, whatever the number of threads.
template <class floatX>
void encoder_backward(float* dwte, floatX* dwpe, const floatX* dout, const int* tokens, int B, int T, int C,
                      Device& device) {
  Scope scope("encoder_backward", device);
  constexpr int strip = 64;
#pragma omp parallel for
  for (int c0 = 0; c0 < C; c0 += strip) {
    const int width = std::min(strip, C - c0);
    for (int bt = 0; bt < B * T; bt++) {
      const floatX* d = dout + static_cast<size_t>(bt) * C + c0;
      float* w = dwte + static_cast<size_t>(tokens[bt]) * C + c0;
#pragma omp simd
      for (int c = 0; c < width; c++) w[c] += to_float(d[c]);
    }
    for (int t = 0; t < T; t++) {
      float sum[strip] = {};
      for (int b = 0; b < B; b++) {
        const floatX* d = dout + (static_cast<size_t>(b) * T + t) * C + c0;
#pragma omp simd
        for (int c = 0; c < width; c++) sum[c] += to_float(d[c]);
      }
      floatX* w = dwpe + static_cast<size_t>(t) * C + c0;
#pragma omp simd
      for (int c = 0; c < width; c++) store(w[c], to_float(w[c]) + sum[c]);
    }
  }
}

// dwte (n) += scratch (n), rounded once
template <class floatX>
void add_embedding_gradient(floatX* dwte, const float* scratch, size_t n, Device& device) {
  Scope scope("add_embedding_gradient", device);
#pragma omp parallel for simd
  for (size_t i = 0; i < n; i++) store(dwte[i], to_float(dwte[i]) + scratch[i]);
}
