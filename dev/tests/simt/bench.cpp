// What the emulation costs: one block of 256 threads (128 for mma), and two of the examples. Times are processor time,
// so that other work on the machine counts little.
#include <algorithm>
#include <cstdio>
#include <ctime>

#include "dev/tests/simt/memory.h"
#include "dev/tests/simt/examples.cuh"

template <int kind>
__global__ void repeat(float* out, const float* in, int n) {
  SHARED_DYNAMIC(uint16_t, tile);
  float x = static_cast<float>(threadIdx.x), c[4] = {};
  uint32_t a[4] = {};
  for (int i = 0; i < n; i++) {
    if (kind == 0) __syncthreads();
    if (kind == 1) __syncwarp();
    if (kind == 2) x = __shfl_xor_sync(all_lanes, x, 1);
    if (kind == 3) mma_m16n8k16(c, a, 0, 0);
    if (kind == 4) ldmatrix_x4(a, to_shared(tile) + threadIdx.x % 32 * 16);
    if (kind == 5) cp_async_16(to_shared(tile) + threadIdx.x * 16, in);
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = x + c[0] + static_cast<float>(a[0]);
}

double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e6 + static_cast<double>(t.tv_nsec) * 1e-3;
}

// Microseconds of the fastest of nine calls.
template <class Run>
double microseconds(Run run) {
  double best = 1e30;
  for (int i = 0; i < 9; i++) {
    const double start = now();
    run();
    best = std::min(best, now() - start);
  }
  return best;
}

template <int kind>
double per_call(int threads) {
  simt::Buffer<float> out(static_cast<size_t>(threads)), in(std::vector<float>(4));
  const auto run = [&](int n) { launch(repeat<kind>, 1, threads, 8192, nullptr, out.data(), in.data(), n); };
  return (microseconds([&] { run(1001); }) - microseconds([&] { run(1); })) / 1000;
}

int main() {
  printf("block barrier, 256 threads   %6.2f us\n", per_call<0>(256));
  printf("warp barrier                 %6.2f us\n", per_call<1>(256) / 8);
  printf("warp shuffle                 %6.2f us\n", per_call<2>(256) / 8);
  printf("warp mma m16n8k16            %6.2f us\n", per_call<3>(128) / 4);
  printf("warp ldmatrix x4             %6.2f us\n", per_call<4>(128) / 4);
  printf("cp.async, a warp's 32        %6.2f us\n", per_call<5>(128) / 4);
  simt::Buffer<float> many(256000);
  printf("block of 256, no waiting     %6.2f us\n",
         microseconds([&] { launch(repeat<9>, 1000, 256, 0, nullptr, many.data(), many.data(), 0); }) / 1000);
  const int N = 1024, C = 384;
  simt::Buffer<float> in(std::vector<float>(N * C, 1.0f)), w(std::vector<float>(C, 1.0f)), out(N * C), mean(N), rstd(N);
  printf("LayerNorm, 1,024 rows of 384 %6.2f ms\n", 1e-3 * microseconds([&] {
    layernorm_example_gpu(out.data(), mean.data(), rstd.data(), in.data(), w.data(), w.data(), N, C, nullptr);
  }));
  const int M = 256;
  simt::Buffer<uint16_t> A(std::vector<uint16_t>(M * M, 0)), B(std::vector<uint16_t>(M * M, 0));
  simt::Buffer<float> product(M * M);
  printf("bf16 GEMM, 256 each way      %6.2f ms\n", 1e-3 * microseconds([&] {
    gemm_example_gpu(product.data(), A.data(), B.data(), M, M, M, nullptr);
  }));
}
