// Matrix products: the linear layers forward and backward.
#pragma once
#include <algorithm>

#include "kernels/column_sums.cuh"
#include "kernels/device.h"
#include "runtime/cublaslt_product.h"
#include "runtime/product.h"

// out (M,N), row stride N, = a (M,K) b (K,N) + bias (N), or out += a b. Sums in fp32, rounded once to the type of out.
template <class Out, class floatX>
void matmul_cpu(Out* out, const Matrix<floatX>& a, const Matrix<floatX>& b, const floatX* bias, int M, int N, int K,
                bool accumulate, Device& device) {
  const int rows = (M + panel_rows - 1) / panel_rows, columns = (N + panel_columns - 1) / panel_columns;
#pragma omp parallel
  {
    omp_set_num_threads(1);  // for this thread's task only: what oneDNN sees when it plans a panel
    float* c = device.scratch<float>(0, size_t{panel_rows} * panel_columns);
#pragma omp for schedule(dynamic)
    for (int panel = 0; panel < rows * columns; panel++) {
      // Neighbouring panels share the longer operand, which is then in the cache.
      const int i0 = (rows > columns ? panel / columns : panel % rows) * panel_rows;
      const int j0 = (rows > columns ? panel % columns : panel / rows) * panel_columns;
      const int m = std::min(panel_rows, M - i0), n = std::min(panel_columns, N - j0);
      panel_product(c, a.at(i0, 0), b.at(0, j0), m, n, K, device);
      for (int i = 0; i < m; i++) {
        Out* o = out + static_cast<size_t>(i0 + i) * N + j0;
        const float* x = c + static_cast<size_t>(i) * panel_columns;
        if (accumulate)
#pragma omp simd
          for (int j = 0; j < n; j++) store(o[j], to_float(o[j]) + x[j]);
        else if (bias)
#pragma omp simd
          for (int j = 0; j < n; j++) store(o[j], x[j] + to_float(bias[j0 + j]));
        else
#pragma omp simd
          for (int j = 0; j < n; j++) store(o[j], x[j]);
      }
    }
  }
}

template <class Out, class floatX>
void matmul(Out* out, const Matrix<floatX>& a, const Matrix<floatX>& b, const floatX* bias, int M, int N, int K,
            bool accumulate, Device& device) {
  if (device.is_cuda()) return cublaslt_product(out, a, b, bias, M, N, K, accumulate, device);
  matmul_cpu(out, a, b, bias, M, N, K, accumulate, device);
}

// out (B,T,OC) = inp (B,T,C) weight^T + bias; weight (OC,C), bias (OC) or null
template <class floatX>
void matmul_forward(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int B, int T, int C,
                    int OC, Device& device) {
  Scope scope("matmul_forward", device);
  matmul(out, Matrix<floatX>{inp, C, 1}, Matrix<floatX>{weight, 1, C}, bias, B * T, OC, C, false, device);
}

// dbias (OC) += dout (rows,OC) summed over rows, in order, whatever the number of threads
template <class floatX>
void bias_backward_cpu(floatX* dbias, const floatX* dout, int rows, int OC) {
  constexpr int strip = 64;
#pragma omp parallel for
  for (int c0 = 0; c0 < OC; c0 += strip) {
    const int width = std::min(strip, OC - c0);
    float sum[strip] = {};
    for (int r = 0; r < rows; r++) {
      const floatX* d = dout + static_cast<size_t>(r) * OC + c0;
#pragma omp simd
      for (int c = 0; c < width; c++) sum[c] += to_float(d[c]);
    }
#pragma omp simd
    for (int c = 0; c < width; c++) store(dbias[c0 + c], to_float(dbias[c0 + c]) + sum[c]);
  }
}

template <class floatX>
void bias_backward(floatX* dbias, const floatX* dout, int rows, int OC, Device& device) {
  Scope scope("bias_backward", device);
  if (device.is_cuda()) {
    float* scratch = device.scratch<float>(0, bias_backward_scratch(rows, OC));
    return bias_backward_cuda(dbias, dout, scratch, rows, OC, device.stream());
  }
  bias_backward_cpu(dbias, dout, rows, OC);
}

// dinp (B,T,C) = dout (B,T,OC) weight; dweight (OC,C) += dout^T inp; dbias (OC) += sum of dout, where not null.
// DWeight is floatX, or float where the sum goes on elsewhere (the tied embedding).
template <class floatX, class DWeight>
void matmul_backward(floatX* dinp, DWeight* dweight, floatX* dbias, const floatX* dout, const floatX* inp,
                     const floatX* weight, int B, int T, int C, int OC, Device& device) {
  if (dbias) bias_backward(dbias, dout, B * T, OC, device);
  Scope scope("matmul_backward", device);
  const Matrix<floatX> no_bias{}, d{dout, OC, 1};
  matmul(dinp, d, Matrix<floatX>{weight, C, 1}, no_bias.data, B * T, C, OC, false, device);
  matmul(dweight, d.transposed(), Matrix<floatX>{inp, C, 1}, no_bias.data, OC, C, B * T, true, device);
}
