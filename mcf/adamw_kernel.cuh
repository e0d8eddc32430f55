// AdamW on a GPU: the pass of mcf/adamw.cuh as one kernel over a strategy.
//
// Weights and states get the bits that they get on the CPU, since each element is the same sequence of correctly
// rounded operations. The sums of quality differ from the CPU's by the order of their additions only, and are the same
// each time.
#pragma once
#include <cfloat>
#include <tuple>
#include <utility>

#include "kernels/blocks.h"
#include "kernels/reduce.cuh"
#include "mcf/quality.cuh"
#include "mcf/strategies.h"

// What a step reads from the device's memory. The host writes it but for clip and skip, which clip_and_skip_cuda puts
// in from the norm, so that no step waits for the host.
struct AdamWStep {
  AdamWScalars scalars;
  int skip;  // not 0: change nothing
};

// scalars.clip as adamw_scalars() has it; skip where a gradient is not finite, and with it the norm.
template <class Step>
__global__ void clip_and_skip_kernel(Step* step, const double* norm, double grad_clip) {
  const double n = *norm;
  step->scalars.clip = clip_factor(grad_clip, n);
  step->skip = !(n <= DBL_MAX);
}
inline void clip_and_skip_cuda(AdamWStep* step, const double* norm, double grad_clip, cudaStream_t stream) {
  launch(clip_and_skip_kernel<AdamWStep>, 1, 1, 0, stream, step, norm, grad_clip);
}

// One element. States come and go as they are stored; with_quality adds what the update intended and did to sums.
template <class S, bool with_quality, class... T>
__device__ inline void adamw_element_gpu(const AdamWScalars& k, size_t place, const typename S::Theta& grad,
                                         typename S::Theta& theta, QualitySums& sums, T&... states) {
  const float g = to_float(grad), theta_before = to_float(theta);
  const uint64_t r = S::stochastic ? random_bits_of(k, place) : 0;
  float u, theta_after = theta_before;
  const std::tuple before(to_float(states)...);
  std::tuple after = before;
  std::apply([&](auto&... s) { S::update(k, r, g, u, theta_after, s...), (store_grid(states, s), ...); }, after);
  store_grid(theta, theta_after);
  if constexpr (with_quality) {
    const double ud = u, e_hi = static_cast<double>(theta_after) - theta_before;
    const double e = S::value(theta_after, std::get<0>(after)) - S::value(theta_before, std::get<0>(before));
    sums.uu += ud * ud, sums.ue += ud * e, sums.ee += e * e, sums.ue_hi += ud * e_hi, sums.ee_hi += e_hi * e_hi;
    const double square = k.lw != 0 ? static_cast<double>(theta_before) * theta_before : 0.0;
    sums.decay += square, sums.lost_decay += e == 0 ? square : 0.0;
    const auto same_v = [&]<size_t... I>(std::index_sequence<I...>) {
      return ((std::get<S::second_moment + I>(after) == std::get<S::second_moment + I>(before)) && ...);
    };
    sums.intended += u != 0, sums.lost += u != 0 && e == 0, sums.lost_hi += u != 0 && e_hi == 0, sums.fed += g != 0;
    sums.stale_v += g != 0 && same_v(std::make_index_sequence<sizeof...(T) - S::second_moment>());
  }
}

// The sum over a thread block, the same bits in every thread. Called once in a kernel.
__device__ inline QualitySums block_quality(const QualitySums& s) {
  SHARED(double, d, [7][warp_size]);
  SHARED(long long, c, [5][warp_size]);
  double sums[7] = {s.uu, s.ue, s.ee, s.ue_hi, s.ee_hi, s.decay, s.lost_decay};
  long long counts[5] = {s.intended, s.lost, s.lost_hi, s.fed, s.stale_v};
  UNROLL
  for (int i = 0; i < 7; i++) {
    sums[i] = warp_sum(sums[i]);
    if (lane_index() == 0) d[i][warp_index()] = sums[i];
  }
  UNROLL
  for (int i = 0; i < 5; i++) {
    counts[i] = warp_sum(counts[i]);
    if (lane_index() == 0) c[i][warp_index()] = counts[i];
  }
  __syncthreads();
  const bool has_part = lane_index() < block_warps();
  UNROLL
  for (int i = 0; i < 7; i++) sums[i] = warp_sum(has_part ? d[i][lane_index()] : 0.0);
  UNROLL
  for (int i = 0; i < 5; i++) counts[i] = warp_sum(has_part ? c[i][lane_index()] : 0ll);
  return {sums[0], sums[1],   sums[2],   sums[3],   sums[4],   sums[5],
          sums[6], counts[0], counts[1], counts[2], counts[3], counts[4]};
}

// Elements that a thread takes at a time: 16 bytes of the widest array, so that a warp reads whole sectors of each.
template <class floatX, class... T>
inline constexpr int adamw_width = 16 / static_cast<int>(std::max({sizeof(floatX), sizeof(T)...}));

// A thread block for each of `blocks`. quality (blocks): the sums of each, where asked for.
// Registers without quality (sm_90): 42 (fp32_master) to 80 (collage_plus), so 24 warps an SM or more, each with 1.8 to
// 3 KB of loads in flight. About 40 KB an SM are needed to keep an H200's memory busy (4.8 TB/s, 1 us).
template <class S, bool with_quality, class... T>
__global__ void __launch_bounds__(256)
    adamw_kernel(typename S::Theta* theta, const typename S::Theta* grads, const Block* blocks, const AdamWStep* step,
                 QualitySums* quality, size_t first, T*... states) {
  constexpr int width = adamw_width<typename S::Theta, T...>;
  const Block block = blocks[blockIdx.x];
  AdamWScalars k = step->scalars;
  if (!block.decay) k.lw = 0;
  const int n = step->skip ? 0 : static_cast<int>(block.n), whole = n / width * width;
  const int thread = static_cast<int>(threadIdx.x);
  QualitySums sums;
  for (int i = thread * width; i < whole; i += 256 * width) {
    const size_t at = block.begin + static_cast<size_t>(i);
    const auto g = load_packed<width>(grads + at);
    auto w = load_packed<width>(theta + at);
    const auto update_run = [&](Packed<T, width>... s) {
      UNROLL
      for (int j = 0; j < width; j++)
        adamw_element_gpu<S, with_quality>(k, at + static_cast<size_t>(j), g.v[j], w.v[j], sums, s.v[j]...);
      store_packed<width>(theta + at, w);
      (store_packed<width>(states + (at - first), s), ...);
    };
    update_run(load_packed<width>(states + (at - first))...);
  }
  if (whole + thread < n) {
    const size_t at = block.begin + static_cast<size_t>(whole + thread);
    adamw_element_gpu<S, with_quality>(k, at, grads[at], theta[at], sums, states[at - first]...);
  }
  if constexpr (with_quality) {
    sums = block_quality(sums);
    if (threadIdx.x == 0) quality[blockIdx.x] = sums;
  }
}

// The `n` blocks, whose list lies on the device as everything else. theta, grads and states: flat buffers, 16-byte
// aligned, blocks as append_blocks() makes them from tensors that start at multiples of tensor_alignment.
// The states begin at element `first` of the flat buffer. quality (n), or null: none. The host adds its sums in the
// order of the blocks.
template <class S, class... T>
void adamw_cuda(typename S::Theta* theta, const typename S::Theta* grads, const Block* blocks, size_t n,
                const AdamWStep* step, QualitySums* quality, size_t first, cudaStream_t stream, T*... states) {
  static_assert(std::is_same_v<std::tuple<T...>, typename S::States>);
  if (n == 0) return;  // more ranks than blocks
  const unsigned grid = static_cast<unsigned>(n);
  if (quality)
    launch(adamw_kernel<S, true, T...>, grid, 256, 0, stream, theta, grads, blocks, step, quality, first, states...);
  else
    launch(adamw_kernel<S, false, T...>, grid, 256, 0, stream, theta, grads, blocks, step, quality, first, states...);
}
