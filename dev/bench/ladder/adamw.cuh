// AdamW in collage_plus (mcf/strategies.h) in three steps, from one kernel an operation to the production kernel
// (mcf/adamw_kernel.cuh). All take the same arguments, and all give the same bits: every version is the same sequence
// of correctly rounded operations for each element, so not even the last bit may depend on how they are cut into
// kernels.
//
// An element has a gradient, a weight and four states, all bf16. A pass must read six numbers and write five: 22 bytes,
// and that is its price, for about 100 operations an element are cheaper than 22 bytes on a GPU.
#pragma once
#include "mcf/adamw.cuh"

namespace ladder {

struct AdamWArrays {
  bf16* theta;        // (n), and so are all
  const bf16* grads;
  bf16 *theta_lo, *m, *v, *v_lo;
  bf16 *g, *u;        // scratch of the unfused version: the clipped gradient, the intended update
  const Block* blocks;  // (n_blocks), on the device
  size_t n, n_blocks;
  const AdamWStep* step;  // (1), on the device
};

// --- Step 1: a kernel an operation ----------------------------------------------------------------------------------
//
// What a framework does without a fused optimizer: one kernel for each line of the algorithm, whose result goes to
// memory and is read again by the next. Each kernel is simple, and each waits for memory: 5 kernels read 12 numbers and
// write 7, 38 bytes an element instead of 22. With one kernel an arithmetic operation, as in a chain of tensor
// expressions, it would be several times that.
template <class T>
__global__ void clip_gradient_kernel(T* g, const T* grads, size_t n, const AdamWStep* step) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) store_grid(g[i], strict::clipped(step->scalars, to_float(grads[i])));
}
template <class T>
__global__ void first_moment_kernel(T* m, const T* g, size_t n, const AdamWStep* step) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float now = to_float(m[i]);
  strict::first_moment(step->scalars, to_float(g[i]), now);
  store_grid(m[i], now);
}
// The second moment is a pair (v, v_lo), multiplied by beta2 as a pair and grown by (1 - beta2) g^2.
template <class T>
__global__ void second_moment_kernel(T* v, T* v_lo, const T* g, size_t n, const AdamWStep* step) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const AdamWScalars& k = step->scalars;
  float hi = to_float(v[i]), lo = to_float(v_lo[i]);
  const float gradient = to_float(g[i]);
  mcf::mul(hi, lo, k.beta2_hi, k.beta2_lo);
  mcf::grow(hi, lo, rn_grid(mul_rn(k.one_minus_beta2, mul_rn(gradient, gradient))));
  store_grid(v[i], hi);
  store_grid(v_lo[i], lo);
}
// A thread block a Block of the parameters, as only those know whether weight decay applies.
template <class T>
__global__ void intended_update_kernel(T* u, const T* theta, const T* m, const T* v, const Block* blocks,
                                       const AdamWStep* step) {
  const Block block = blocks[blockIdx.x];
  AdamWScalars k = step->scalars;
  if (!block.decay) k.lw = 0;
  for (unsigned j = threadIdx.x; j < block.n; j += blockDim.x) {
    const size_t i = block.begin + j;
    store_grid(u[i], strict::intended_update(k, to_float(theta[i]), to_float(m[i]), to_float(v[i])));
  }
}
template <class T>
__global__ void grow_weight_kernel(T* theta, T* theta_lo, const T* u, const Block* blocks) {
  const Block block = blocks[blockIdx.x];
  for (unsigned j = threadIdx.x; j < block.n; j += blockDim.x) {
    const size_t i = block.begin + j;
    float hi = to_float(theta[i]), lo = to_float(theta_lo[i]);
    mcf::grow(hi, lo, to_float(u[i]));
    store_grid(theta[i], hi);
    store_grid(theta_lo[i], lo);
  }
}
// The first three work on the flat buffer: in the gaps between tensors all numbers are 0 and stay so.
inline void adamw_unfused(const AdamWArrays& a, cudaStream_t stream) {
  const unsigned flat = blocks_for(a.n, 256), grid = static_cast<unsigned>(a.n_blocks);
  launch(clip_gradient_kernel<bf16>, flat, 256, 0, stream, a.g, a.grads, a.n, a.step);
  launch(first_moment_kernel<bf16>, flat, 256, 0, stream, a.m, a.g, a.n, a.step);
  launch(second_moment_kernel<bf16>, flat, 256, 0, stream, a.v, a.v_lo, a.g, a.n, a.step);
  launch(intended_update_kernel<bf16>, grid, 256, 0, stream, a.u, a.theta, a.m, a.v, a.blocks, a.step);
  launch(grow_weight_kernel<bf16>, grid, 256, 0, stream, a.theta, a.theta_lo, a.u, a.blocks);
}

// --- Step 2: one pass -----------------------------------------------------------------------------------------------
//
// All operations of an element in one kernel: what lay in memory between them stays in registers, so 22 bytes an
// element move instead of 38, no scratch is needed, and one launch is left of five. A thread still loads 2 bytes at a
// time. The arithmetic is the strategy's own update(), so any other strategy would do.
template <class T>
__global__ void adamw_fused_kernel(T* theta, const T* grads, T* theta_lo, T* m, T* v, T* v_lo, const Block* blocks,
                                   const AdamWStep* step) {
  const Block block = blocks[blockIdx.x];
  AdamWScalars k = step->scalars;
  if (!block.decay) k.lw = 0;
  for (unsigned j = threadIdx.x; j < block.n; j += blockDim.x) {
    const size_t i = block.begin + j;
    float u, hi = to_float(theta[i]), lo = to_float(theta_lo[i]), m_now = to_float(m[i]);
    float v_now = to_float(v[i]), v_lo_now = to_float(v_lo[i]);
    CollagePlus::update(k, 0, to_float(grads[i]), u, hi, lo, m_now, v_now, v_lo_now);
    store_grid(theta[i], hi), store_grid(theta_lo[i], lo), store_grid(m[i], m_now);
    store_grid(v[i], v_now), store_grid(v_lo[i], v_lo_now);
  }
}
inline void adamw_fused(const AdamWArrays& a, cudaStream_t stream) {
  launch(adamw_fused_kernel<bf16>, static_cast<unsigned>(a.n_blocks), 256, 0, stream, a.theta, a.grads, a.theta_lo, a.m,
         a.v, a.v_lo, a.blocks, a.step);
}

// --- Step 3: 16 bytes a thread and array: the production kernel -----------------------------------------------------
//
// A thread takes eight neighbouring elements, one 16-byte load an array: six loads keep 96 bytes a thread on their way
// instead of 12, enough to keep the memory busy with the few warps that 80 registers a thread leave room for. The eight
// elements also are eight independent chains of operations, of which the GPU always has one that need not wait.
// What it has besides: any strategy from its list of states, the quality sums in the same pass, and skipping a step.
inline void adamw_production(const AdamWArrays& a, cudaStream_t stream) {
  adamw_cuda<CollagePlus>(a.theta, a.grads, a.blocks, a.n_blocks, a.step, nullptr, 0, stream, a.theta_lo, a.m, a.v,
                          a.v_lo);
}

struct AdamWVersion {
  const char* name;
  int bytes;  // that it moves for each element
  void (*run)(const AdamWArrays&, cudaStream_t);
};
// From the slowest to the production kernel, which comes last.
inline constexpr AdamWVersion adamw_versions[] = {
    {"a kernel an operation", 38, adamw_unfused},
    {"one pass", 22, adamw_fused},
    {"16-byte loads (production)", 22, adamw_production},
};

}  // namespace ladder
