// Runs of the examples under every order of execution, with or without a planted fault.
#pragma once
#include <random>

#include "dev/tests/simt/examples.cuh"
#include "dev/tests/simt/memory.h"
#include "dev/tests/simt/sweep.h"

inline std::vector<float> normal(size_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> x(n);
  for (float& v : x) v = distribution(generator);
  return x;
}
inline std::vector<uint16_t> to_bf16(const std::vector<float>& x) {
  std::vector<uint16_t> h(x.size());
  for (size_t i = 0; i < x.size(); i++) h[i] = float_to_bf16_bits(x[i]);
  return h;
}

template <Plant plant>
std::string run_reverse(std::vector<float>* result) {
  const int n = 512;
  simt::Buffer<float> in(normal(n, 1), "in");
  return simt::differing_order([&] {
    simt::Buffer<float> out(n, "out");
    launch(reverse_blocks<plant>, n / 64, 64, 0, nullptr, out.data(), in.data());
    return out.values();
  }, result);
}

template <Plant plant>
std::string run_neighbours(std::vector<float>* result) {
  const int n = 96;
  simt::Buffer<float> in(normal(n, 2), "in");
  return simt::differing_order([&] {
    simt::Buffer<float> out(n, "out");
    launch(warp_neighbours<plant>, 1, n, 0, nullptr, out.data(), in.data());
    return out.values();
  }, result);
}

template <Plant plant>
std::string run_gemm(int M, int N, int K, std::vector<float>* result) {
  simt::Buffer<uint16_t> A(to_bf16(normal(M * K, 7)), "A"), B(to_bf16(normal(K * N, 8)), "B");
  return simt::differing_order([&] {
    simt::Buffer<float> C(static_cast<size_t>(M) * N, "C");
    gemm_example_gpu<plant>(C.data(), A.data(), B.data(), M, N, K, nullptr);
    return C.values();
  }, result);
}

// The number of wrong elements. Products are exact in fp32 and both sides sum them in order of k: equal bits.
inline int gemm_errors(int M, int N, int K, const std::vector<float>& result) {
  const std::vector<uint16_t> A = to_bf16(normal(M * K, 7)), B = to_bf16(normal(K * N, 8));
  int wrong = 0;
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) {
      float sum = 0;
      for (int k = 0; k < K; k++) sum += bf16_bits_to_float(A[m * K + k]) * bf16_bits_to_float(B[k * N + n]);
      wrong += !(result[m * N + n] == sum);
    }
  return wrong;
}
