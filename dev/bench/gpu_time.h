// Time of work on a GPU, and the lines that say where it was measured.
#pragma once
#include <cstdio>
#include <ctime>
#include <string>
#include <vector>

#include "dev/bench/median.h"
#include "kernels/device.h"
#include "mcf/bf16.h"

// Milliseconds that issue() takes on the device: the median of several rounds, each long enough that the events around
// it do not count (20 ms or more, one launch at least).
template <class F>
double milliseconds(Device& device, bool quick, F&& issue) {
  Stopwatch watch(device);
  const auto run = [&](int times) {
    watch.start();
    for (int i = 0; i < times; i++) issue();
    watch.stop();
    return watch.ms();
  };
  run(1);  // the first launch loads the kernel
  if (quick) return run(1);
  const double once = run(1);
  const int times = std::max(1, static_cast<int>(20 / std::max(once, 1e-3)));
  std::vector<double> rounds;
  for (int i = 0; i < 7; i++) rounds.push_back(run(times) / times);
  return median(rounds);
}

// CUDA version as the runtime numbers it: 13000 is 13.0.
inline std::string cuda_version(int number) { return strf("%d.%d", number / 1000, number % 1000 / 10); }

struct Machine {
  std::string gpu, driver, runtime, date;  // driver: the newest CUDA that it supports
  explicit Machine(const Device& device) : gpu(device.properties().name) {
    int number = 0;
    CUDA_CHECK(cudaDriverGetVersion(&number));
    driver = cuda_version(number);
    CUDA_CHECK(cudaRuntimeGetVersion(&number));
    runtime = cuda_version(number);
    char text[32];
    const time_t now = time(nullptr);
    strftime(text, sizeof text, "%Y-%m-%d", gmtime(&now));
    date = text;
  }
  void print() const {
    printf("%s, driver for CUDA %s, runtime %s, %s\n\n", gpu.c_str(), driver.c_str(), runtime.c_str(), date.c_str());
  }
};

// x in (-size, size), so that no operand is 0: multiplying zeros takes less power, and clocks rise.
template <class X>
__global__ void fill_kernel(X* x, size_t n, float size) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const uint32_t hash = (static_cast<uint32_t>(i) ^ static_cast<uint32_t>(i >> 32)) * 2654435769u;
  store(x[i], size * (static_cast<float>(hash >> 8) * 0x1p-23f - 1.0f));
}
template <class X>
void fill(X* x, size_t n, float size, Device& device) {
  launch(fill_kernel<X>, static_cast<unsigned>((n + 255) / 256), 256, 0, device.stream(), x, n, size);
}
