// The gradients of a step's micro-batches, added up beside the gradient buffer (--grad-accum).
//
// Backward adds to the gradient buffer, so by default micro-batches are summed there, in its element type: in bf16 each
// sum loses what lies below half an ulp. Here every micro-batch's gradient starts at 0 and joins a sum that keeps more:
// a pair of bf16 numbers grown by it (mcf/expansion.h), or fp32. After the last, the gradient buffer gets the sum
// rounded once.
#pragma once
#include <string>
#include <type_traits>

#include "kernels/device.h"
#include "kernels/reduce.cuh"
#include "mcf/expansion.h"

// One element: sum += g; then g is 0, or after the last micro-batch the sum, which starts over.
__host__ __device__ inline void add_gradient(bf16& g, float& sum, bool last) {
  sum = add_rn(sum, to_float(g));
  store(g, last ? sum : 0.0f);
  if (last) sum = 0;
}
__host__ __device__ inline void add_gradient(bf16& g, bf16& hi, bf16& lo, bool last) {
  float x = to_float(hi), y = to_float(lo);
  mcf::grow(x, y, to_float(g));
  store(g, last ? x : 0.0f);
  store(hi, last ? 0.0f : x);
  store(lo, last ? 0.0f : y);
}

template <class... T>
void add_gradients_cpu(bf16* g, size_t n, bool last, T*... sum) {
#pragma omp parallel for simd schedule(static)
  for (size_t i = 0; i < n; i++) add_gradient(g[i], sum[i]..., last);
}

template <class... T>
__global__ void __launch_bounds__(256) add_gradients_kernel(bf16* g, size_t n, bool last, T*... sum) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) add_gradient(g[i], sum[i]..., last);
}

class GradientSum {
 public:
  // kind: "bf16" (none of this), "pair" or "fp32", for n gradients.
  GradientSum(const std::string& kind, size_t n, Device& device) {
    if (kind == "fp32") sum_ = Buffer<float>(device, Memory::gradients, n);
    if (kind == "pair")
      hi_ = Buffer<bf16>(device, Memory::gradients, n), lo_ = Buffer<bf16>(device, Memory::gradients, n);
  }
  static constexpr int bytes(std::string_view kind) { return kind == "bf16" ? 0 : 4; }  // a parameter

  bool active() const { return sum_.size() || hi_.size(); }

  // Adds the gradients [begin, end) of the whole buffer of a micro-batch.
  void add(bf16* grads, size_t begin, size_t end, bool last, Device& device) {
    Scope scope("add_gradients", device);
    if (sum_.size()) add_to(grads + begin, end - begin, last, device, sum_.data() + begin);
    if (hi_.size()) add_to(grads + begin, end - begin, last, device, hi_.data() + begin, lo_.data() + begin);
  }
  // fp32 gradients add up in their own buffer: `kind` is "bf16" for them.
  void add(float*, size_t, size_t, bool, Device&) {}

 private:
  template <class... T>
  static void add_to(bf16* g, size_t n, bool last, Device& device, T*... sum) {
    if (device.is_cuda())
      launch((add_gradients_kernel<T...>), blocks_for(n, 256), 256, 0, device.stream(), g, n, last, sum...);
    else
      add_gradients_cpu(g, n, last, sum...);
  }

  Buffer<float> sum_;
  Buffer<bf16> hi_, lo_;
};
