// LayerNorm over the channels, alone and fused with the residual addition before it.
//   mean = sum(x) / C, rstd = 1 / sqrt(sum((x - mean)^2) / C + 1e-5), out = (x - mean) * rstd * weight + bias
#pragma once
#include <algorithm>
#include <cmath>

#include "kernels/device.h"
#include "mcf/bf16.h"

inline constexpr float layernorm_eps = 1e-5f;

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

// out (B,T,C), mean and rstd (B,T) from inp (B,T,C), weight and bias (C)
template <class floatX>
void layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                       const floatX* bias, int B, int T, int C, Device& device) {
  Scope scope("layernorm_forward", device);
#pragma omp parallel for
  for (int r = 0; r < B * T; r++) {
    const size_t row = static_cast<size_t>(r) * C;
    layernorm_row_cpu(out + row, mean + r, rstd + r, inp + row, weight, bias, C);
  }
}

// residual (B,T,C) = inp1 + inp2; out, mean, rstd = layernorm of the residual as stored
template <class floatX>
void residual_layernorm_forward(floatX* residual, floatX* out, float* mean, float* rstd, const floatX* inp1,
                                const floatX* inp2, const floatX* weight, const floatX* bias, int B, int T, int C,
                                Device& device) {
  Scope scope("residual_layernorm_forward", device);
#pragma omp parallel for
  for (int r = 0; r < B * T; r++) {
    const size_t row = static_cast<size_t>(r) * C;
#pragma omp simd
    for (int c = 0; c < C; c++) store(residual[row + c], to_float(inp1[row + c]) + to_float(inp2[row + c]));
    layernorm_row_cpu(out + row, mean + r, rstd + r, residual + row, weight, bias, C);
  }
}

// dinp (B,T,C) += , dweight (C) +=, dbias (C) +=, from dout (B,T,C) and what forward saw and saved.
// dinp is added to because the residual stream's gradient is there already.
template <class floatX>
void layernorm_backward(floatX* dinp, floatX* dweight, floatX* dbias, const floatX* dout, const floatX* inp,
                        const floatX* weight, const float* mean, const float* rstd, int B, int T, int C,
                        Device& device) {
  Scope scope("layernorm_backward", device);
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
