// Matrix products on a GPU, by cuBLASLt.
#pragma once
#include "kernels/device.h"
#include "mcf/bf16.h"
#include "runtime/product.h"

// out (M,N), row stride N, = a (M,K) b (K,N) + bias (N, or null), or out += a b. All on the device. Sums in fp32 (no
// TF32), rounded once to the type of out. The algorithm is chosen once a shape and kept, so repeated runs give the same
// bits. Throws RunError where cuBLASLt can't, or where the build has no GPU.
void cublaslt_product(float* out, const Matrix<float>& a, const Matrix<float>& b, const float* bias, int M, int N,
                      int K, bool accumulate, Device& device);
void cublaslt_product(bf16* out, const Matrix<bf16>& a, const Matrix<bf16>& b, const bf16* bias, int M, int N, int K,
                      bool accumulate, Device& device);
void cublaslt_product(float* out, const Matrix<bf16>& a, const Matrix<bf16>& b, const bf16* bias, int M, int N, int K,
                      bool accumulate, Device& device);
