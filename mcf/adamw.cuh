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

// One element. Not written inside the simd loop, since g++ 12 keeps a loop scalar that declares variables whose address
// is taken; here they are gone once the call is inlined.
template <class S, bool with_quality, class... T>
[[gnu::always_inline]] inline void adamw_element(const AdamWScalars& k, const typename S::Theta& grad,
                                                 typename S::Theta& theta, UpdateTrace& trace, size_t i, T&... states) {
  const float g = to_float(grad), theta_before = to_float(theta);
  float u, theta_after = theta_before;
  const std::tuple before(to_float(states)...);
  std::tuple after = before;
  std::apply([&](auto&... s) { S::update(k, g, u, theta_after, s...), (store_grid(states, s), ...); }, after);
  store_grid(theta, theta_after);
  if constexpr (with_quality) {
    trace.g[i] = g;
    trace.u[i] = u;
    trace.e[i] = S::value(theta_after, std::get<0>(after)) - S::value(theta_before, std::get<0>(before));
    trace.e_hi[i] = static_cast<double>(theta_after) - theta_before;
    trace.v_moved[i] = [&]<size_t... I>(std::index_sequence<I...>) {
      return static_cast<int>(
          ((std::get<S::second_moment + I>(after) != std::get<S::second_moment + I>(before)) | ...));
    }
    (std::make_index_sequence<sizeof...(T) - S::second_moment>());
  }
}

// One block on the CPU. s...: the states' elements from the block's first on.
template <class S, bool with_quality, class... T>
QualitySums adamw_block_cpu(const AdamWScalars& scalars, const typename S::Theta* __restrict grad,
                            typename S::Theta* __restrict theta, size_t n, T* __restrict... s) {
  const AdamWScalars k = scalars;  // a local copy can't alias the arrays
  QualitySums sums;
  UpdateTrace trace;
  for (size_t begin = 0; begin < n; begin += UpdateTrace::size) {
    const size_t count = std::min(UpdateTrace::size, n - begin);
#pragma omp simd
    for (size_t i = 0; i < count; i++)
      adamw_element<S, with_quality>(k, grad[begin + i], theta[begin + i], trace, i, s[begin + i]...);
    if (with_quality) sums += trace.sums(count);
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
