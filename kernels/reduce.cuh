// What several kernels share: runs of elements that lie side by side, and sums over a warp and a block.
//
// Every sum has a fixed order, so that a kernel gives the same bits each time it runs.
#pragma once
#include <algorithm>

#include "kernels/portable.cuh"
#include "mcf/bf16.h"

// n elements of T as they lie in memory, moved by one instruction: 16 bytes at most.
template <class T, int n>
struct alignas(n * sizeof(T)) Packed {
  static_assert(n * sizeof(T) <= 16);
  T v[n];
};
// Precondition of both: an address aligned to n elements.
template <int n, class T>
__device__ inline Packed<T, n> load_packed(const T* p) {
  return *reinterpret_cast<const Packed<T, n>*>(p);
}
template <int n, class T>
__device__ inline void store_packed(T* p, const Packed<T, n>& x) {
  *reinterpret_cast<Packed<T, n>*>(p) = x;
}

// Elements that a lane moves at a time: 16 bytes of T where rows and pointers allow it, else 1. A row of `columns`
// elements allows it if it is a multiple of 16 bytes long; a tail of a flat array is for the kernel to handle.
template <class T>
inline constexpr int lane_width = 16 / static_cast<int>(sizeof(T));
inline bool aligned_16() { return true; }
template <class P, class... More>
bool aligned_16(P* pointer, More*... more) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && aligned_16(more...);
}
// Calls f.operator()<width>() with the width that rows of that many columns at these addresses allow.
template <class floatX, class F, class... P>
void with_width(int columns, F&& f, P*... pointers) {
  if (columns % lane_width<floatX> == 0 && aligned_16(pointers...))
    f.template operator()<lane_width<floatX>>();
  else
    f.template operator()<1>();
}

// `width` elements as floats. A run of floats beside bf16 ones takes two 16-byte accesses.
template <int width, class T>
__device__ inline void load_run(float (&x)[width], const T* p) {
  constexpr int part = std::min(width, lane_width<T>);
  UNROLL
  for (int i = 0; i < width; i += part) {
    const Packed<T, part> raw = load_packed<part>(p + i);
    UNROLL
    for (int j = 0; j < part; j++) x[i + j] = to_float(raw.v[j]);
  }
}
template <int width, class T>
__device__ inline void store_run(T* p, const float (&x)[width]) {
  constexpr int part = std::min(width, lane_width<T>);
  UNROLL
  for (int i = 0; i < width; i += part) {
    Packed<T, part> raw;
    UNROLL
    for (int j = 0; j < part; j++) store(raw.v[j], x[i + j]);
    store_packed<part>(p + i, raw);
  }
}

__device__ inline int lane_index() { return static_cast<int>(threadIdx.x % warp_size); }
__device__ inline int warp_index() { return static_cast<int>(threadIdx.x / warp_size); }
__device__ inline int block_warps() { return static_cast<int>(blockDim.x / warp_size); }

// The sum (maximum) over the warp, the same bits in every lane: a butterfly, and a + b = b + a.
template <class X>
__device__ inline X warp_sum(X x) {
  UNROLL
  for (int offset = warp_size / 2; offset > 0; offset /= 2) x = x + __shfl_xor_sync(all_lanes, x, offset);
  return x;
}
__device__ inline float warp_max(float x) {
  UNROLL
  for (int offset = warp_size / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(all_lanes, x, offset));
  return x;
}

// The sum over a block of up to 32 whole warps, the same bits in every thread. partial: 32 elements in shared memory,
// which may be used again after a further barrier.
template <class X>
__device__ inline X block_sum(X x, X* partial) {
  x = warp_sum(x);
  if (lane_index() == 0) partial[warp_index()] = x;
  __syncthreads();
  return warp_sum(lane_index() < block_warps() ? partial[lane_index()] : X{0});
}

inline unsigned blocks_for(size_t items, size_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}
