// AdamW in place, generic over a precision strategy (mcf/strategies.h).
//
// One pass: read the gradient, weight and states, update, write weight and states, and gather the quality sums on the
// way.
#pragma once
#include <cmath>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/device.h"
#include "mcf/adamw_kernel.cuh"
#include "mcf/quality.cuh"
#include "mcf/strategies.h"

// The optimizer is a value apart from the model: it owns a strategy's states, for all blocks of the parameters or for
// this rank's part, and reads the gradient buffer. floatX: the element type of weights and gradients.
template <class floatX>
class Optimizer {
 public:
  struct State {
    const char* name;
    size_t element_bytes;
    void* data;  // as many elements as the part, on the device
  };
  virtual ~Optimizer() = default;

  // Updates its part of params (and the states) with the gradients; both are whole flat buffers. k: the step's scalars;
  // k.lw applies to the blocks that decay, k.clip comes from norm (1), on the device: clipped where grad_clip > 0 and
  // *norm > grad_clip, and nothing at all changes where *norm is not finite.
  virtual void update(floatX* params, const floatX* grads, const AdamWScalars& k, double grad_clip, const double* norm,
                      bool with_quality, Device& device) = 0;

  // What the last update did to each block of its part, where it was asked for: (blocks), on the device. Other ranks
  // put theirs beside it.
  QualitySums* block_sums() const { return block_sums_.data(); }
  // Their sum in the order of the blocks. Waits for the device.
  QualitySums quality(Device& device) const {
    std::vector<QualitySums> blocks(block_sums_.size());
    device.download(blocks.data(), block_sums_.data(), blocks.size());
    QualitySums sums;
    for (const auto& block : blocks) sums += block;
    return sums;
  }

  const std::vector<State>& states() const { return states_; }

 protected:
  std::vector<State> states_;
  Buffer<QualitySums> block_sums_;
};

// One element; gives the intended update. Not written inside the simd loop, since g++ 12 keeps a loop scalar that
// declares variables whose address is taken; here they are gone once the call is inlined.
template <class S, class... T>
[[gnu::always_inline]] inline float adamw_element(const AdamWScalars& k, const typename S::Theta& grad,
                                                  typename S::Theta& theta, T&... states) {
  float u, theta_now = to_float(theta);
  std::tuple now(to_float(states)...);
  std::apply([&](auto&... s) { S::update(k, to_float(grad), u, theta_now, s...), (store_grid(states, s), ...); }, now);
  store_grid(theta, theta_now);
  return u;
}

// One block on the CPU, in runs that stay in the L1 cache. s...: the states' elements from the block's first on.
template <class S, bool with_quality, class... T>
QualitySums adamw_block_cpu(const AdamWScalars& scalars, const typename S::Theta* __restrict grad,
                            typename S::Theta* __restrict theta, size_t n, T* __restrict... s) {
  constexpr size_t run = UpdateTrace<S>::size;
  constexpr bool strict = std::is_same_v<std::tuple_element_t<0, typename S::States>, bf16>;
  const AdamWScalars k = scalars;  // a local copy can't alias the arrays
  QualitySums sums;
  UpdateTrace<S> trace;
  uint8_t bytes[run];
  for (size_t begin = 0; begin < n; begin += run) {
    const size_t count = std::min(run, n - begin);
    if constexpr (with_quality) trace.start(count, theta + begin, s + begin...);
#pragma omp simd
    for (size_t i = 0; i < count; i++) {
      const float u = adamw_element<S>(k, grad[begin + i], theta[begin + i], s[begin + i]...);
      if constexpr (with_quality) trace.u[i] = u;
      // Read by nobody. An array of bytes makes g++ take 32 elements at a time, four AVX2 vectors side by side, where
      // two leave the processor waiting for results: an element's operations are one long chain. 1.94 to 1.63 ns an
      // element for bf16, 2.81 to 2.18 for collage_light, 4.25 to 3.05 for collage_plus (Zen 3, one thread, in cache).
      if constexpr (strict) bytes[i] = static_cast<uint8_t>(grad[begin + i].bits);
    }
    if constexpr (strict) asm volatile("" : : "r"(bytes) : "memory");  // else the compiler leaves the bytes out
    if constexpr (with_quality) sums += trace.sums(count, grad + begin, theta + begin, s + begin...);
  }
  return sums;
}

template <class S, class States = typename S::States>
class AdamW;

template <class S, class... T>
class AdamW<S, std::tuple<T...>> final : public Optimizer<typename S::Theta> {
  using floatX = typename S::Theta;

 public:
  // part: the blocks that this optimizer owns and has states for. params: the initial weights, the whole flat buffer,
  // which a master copy starts from.
  AdamW(const floatX* params, const BlockList& blocks, const Part& part, Device& device)
      : blocks_(blocks),
        part_(part),
        arrays_{Buffer<T>(device, Memory::states, part.n())...},
        step_(device, Memory::workspace, 1) {
    this->block_sums_ = Buffer<QualitySums>(device, Memory::workspace, blocks.host.size());
    part_.last_block = std::min(part.last_block, blocks.host.size());
    int index = 0;
    std::apply([&](auto&... array) { (add_state(index++, array, params, device), ...); }, arrays_);
  }

  void update(floatX* params, const floatX* grads, const AdamWScalars& k, double grad_clip, const double* norm,
              bool with_quality, Device& device) override {
    Scope scope("adamw", device);
    if (device.is_cuda()) {
      const AdamWStep step{k, 0};
      device.upload(step_.data(), &step, 1);
      clip_and_skip_cuda(step_, norm, grad_clip, device.stream());
      std::apply(
          [&](auto&... array) {
            adamw_cuda<S>(params, grads, blocks_.device + part_.first_block, part_.last_block - part_.first_block,
                          step_.data(), with_quality ? this->block_sums() + part_.first_block : nullptr, part_.begin,
                          device.stream(), array.data()...);
          },
          arrays_);
    } else if (std::isfinite(*norm)) {
      AdamWScalars clipped = k;
      clipped.clip = clip_factor(grad_clip, *norm);
      with_quality ? update_cpu<true>(params, grads, clipped) : update_cpu<false>(params, grads, clipped);
    }
  }

 private:
  template <class E>
  void add_state(int index, Buffer<E>& array, const floatX* params, Device& device) {
    const char* name = S::state_names[static_cast<size_t>(index)];
    this->states_.push_back({name, sizeof(E), array.data()});
    if (!starts_as_theta(name)) return;
    std::vector<floatX> theta(array.size());
    std::vector<E> state(array.size());
    device.download(theta.data(), params + part_.begin, theta.size());
    for (size_t i = 0; i < state.size(); i++) store(state[i], to_float(theta[i]));
    device.upload(array.data(), state.data(), state.size());
  }

  template <bool with_quality>
  void update_cpu(floatX* params, const floatX* grads, const AdamWScalars& k) {
    AdamWScalars no_decay = k;
    no_decay.lw = 0;
#pragma omp parallel for schedule(static)
    for (size_t b = part_.first_block; b < part_.last_block; b++) {
      const Block& block = blocks_.host[b];
      std::apply(
          [&](auto&... array) {
            const QualitySums sums =
                adamw_block_cpu<S, with_quality>(block.decay ? k : no_decay, grads + block.begin, params + block.begin,
                                                 block.n, array.data() + (block.begin - part_.begin)...);
            if constexpr (with_quality) this->block_sums()[b] = sums;
          },
          arrays_);
    }
  }

  const BlockList& blocks_;
  Part part_;
  std::tuple<Buffer<T>...> arrays_;
  Buffer<AdamWStep> step_;  // what a GPU reads
};

// The optimizer of that name whose weights are floatX; null where there is none.
template <class floatX>
std::unique_ptr<Optimizer<floatX>> make_optimizer(const std::string& precision, const floatX* params,
                                                  const BlockList& blocks, const Part& part, Device& device) {
  std::unique_ptr<Optimizer<floatX>> optimizer;
  with_strategy(precision, [&]<class S>() {
    if constexpr (std::is_same_v<typename S::Theta, floatX>)
      optimizer = std::make_unique<AdamW<S>>(params, blocks, part, device);
  });
  return optimizer;
}
