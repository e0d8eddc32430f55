// AdamW in place, generic over a precision strategy (mcf/strategies.h).
//
// One pass: read the gradient, weight and states, update, write weight and states, and gather the quality sums on the
// way.
#pragma once
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/blocks.h"
#include "kernels/device.h"
#include "mcf/quality.cuh"
#include "mcf/strategies.h"

// The optimizer is a value apart from the model: it owns a strategy's states and reads the gradient buffer.
// floatX: the element type of weights and gradients.
template <class floatX>
class Optimizer {
 public:
  struct State {
    const char* name;
    size_t element_bytes;
    void* data;  // as many elements as the flat parameter buffer
  };
  virtual ~Optimizer() = default;

  // Updates params (and the states) with the gradients. k.lw applies to the blocks that decay. Sums of quality where
  // asked for, else zeros.
  virtual QualitySums update(floatX* params, const floatX* grads, const std::vector<Block>& blocks,
                             const AdamWScalars& k, bool with_quality, Device& device) = 0;

  const std::vector<State>& states() const { return states_; }

 protected:
  std::vector<State> states_;
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
  // n: elements of the flat parameter buffer. params: the initial weights, which a master copy starts from.
  AdamW(const floatX* params, size_t n, Device& device) : arrays_{Buffer<T>(device, Memory::states, n)...} {
    int index = 0;
    std::apply([&](auto&... array) { (add_state(index++, array, params), ...); }, arrays_);
  }

  QualitySums update(floatX* params, const floatX* grads, const std::vector<Block>& blocks, const AdamWScalars& k,
                     bool with_quality, Device& device) override {
    Scope scope("adamw", device);
    return with_quality ? update_blocks<true>(params, grads, blocks, k)
                        : update_blocks<false>(params, grads, blocks, k);
  }

 private:
  template <class E>
  void add_state(int index, Buffer<E>& array, const floatX* params) {
    const char* name = S::state_names[static_cast<size_t>(index)];
    this->states_.push_back({name, sizeof(E), array.data()});
    if (starts_as_theta(name))
      for (size_t i = 0; i < array.size(); i++) store(array[i], to_float(params[i]));
  }

  template <bool with_quality>
  QualitySums update_blocks(floatX* params, const floatX* grads, const std::vector<Block>& blocks,
                            const AdamWScalars& k) {
    partial_.resize(blocks.size());
    AdamWScalars no_decay = k;
    no_decay.lw = 0;
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < blocks.size(); b++) {
      const Block& block = blocks[b];
      std::apply(
          [&](auto&... array) {
            partial_[b] =
                adamw_block_cpu<S, with_quality>(block.decay ? k : no_decay, grads + block.begin, params + block.begin,
                                                 block.n, array.data() + block.begin...);
          },
          arrays_);
    }
    QualitySums sums;
    if (with_quality)
      for (const auto& p : partial_) sums += p;
    return sums;
  }

  std::tuple<Buffer<T>...> arrays_;
  std::vector<QualitySums> partial_;  // one a block
};

// The optimizer of that name whose weights are floatX; null where there is none.
template <class floatX>
std::unique_ptr<Optimizer<floatX>> make_optimizer(const std::string& precision, const floatX* params, size_t n,
                                                  Device& device) {
  std::unique_ptr<Optimizer<floatX>> optimizer;
  with_strategy(precision, [&]<class S>() {
    if constexpr (std::is_same_v<typename S::Theta, floatX>) optimizer = std::make_unique<AdamW<S>>(params, n, device);
  });
  return optimizer;
}
