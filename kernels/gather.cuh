// out (n) = from[at[i] - first]: single elements of a flat buffer that begins at element `first`.
#pragma once
#include <vector>

#include "kernels/device.h"
#include "kernels/reduce.cuh"
#include "mcf/bf16.h"

template <class T>
void gather_cpu(T* out, const T* from, size_t first, const size_t* at, size_t n) {
#pragma omp parallel for schedule(static)
  for (size_t i = 0; i < n; i++) out[i] = from[at[i] - first];
}

template <class T>
__global__ void __launch_bounds__(256) gather_kernel(T* out, const T* from, size_t first, const size_t* at, size_t n) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = from[at[i] - first];
}

template <class T>
void gather(T* out, const T* from, size_t first, const size_t* at, size_t n, Device& device) {
  Scope scope("gather", device);
  if (n == 0) return;
  if (device.is_cuda())
    launch(gather_kernel<T>, blocks_for(n, 256), 256, 0, device.stream(), out, from, first, at, n);
  else
    gather_cpu(out, from, first, at, n);
}

// The same in host memory, in double whatever is stored. Waits for the device.
template <class T>
std::vector<double> gather_to_host(const T* from, size_t first, const size_t* at, size_t n, Device& device) {
  T* gathered = device.scratch<T>(0, n);
  gather(gathered, from, first, at, n, device);
  std::vector<T> host(n);
  device.download(host.data(), gathered, n);
  std::vector<double> wide(n);
  for (size_t i = 0; i < n; i++) wide[i] = to_float(host[i]);
  return wide;
}
