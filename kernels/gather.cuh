// out (n) = from[at[i] - first]: single elements of a flat buffer that begins at element `first`.
#pragma once
#include "kernels/device.h"
#include "kernels/reduce.cuh"

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

// The same in host memory: n elements as they are stored. Waits for the device.
template <class T>
void gather_to_host(void* out, const T* from, size_t first, const size_t* at, size_t n, Device& device) {
  T* gathered = device.scratch<T>(0, n);
  gather(gathered, from, first, at, n, device);
  device.download(static_cast<T*>(out), gathered, n);
}
