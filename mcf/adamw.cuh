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
#include "kernels/gather.cuh"
#include "mcf/adamw_kernel.cuh"
#include "mcf/convert.h"
#include "mcf/quality.cuh"
#include "mcf/strategies.h"

// The optimizer is a value apart from the model: it owns a strategy's states, for all blocks of the parameters or for
// this rank's part, and reads the gradient buffer. floatX: the element type of weights and gradients.
template <class floatX>
class Optimizer {
 public:
  struct State {
    const char *name, *dtype;
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
  // The same in host memory. Waits for the device.
  std::vector<QualitySums> quality(Device& device) const {
    std::vector<QualitySums> blocks(block_sums_.size());
    device.download(blocks.data(), block_sums_.data(), blocks.size());
    return blocks;
  }

  // Full values of n elements of its part; at (n), on the device: their places in the flat buffer. Waits for the
  // device.
  virtual FullValues values(const floatX* params, const size_t* at, size_t n, Device& device) const = 0;

  // n elements of its part from place `begin` on, as they are stored: theta, which is in params, then its states.
  StateSlice read(const floatX* params, size_t begin, size_t n, Device& device) const {
    StateSlice slice;
    const auto add = [&](const char* name, const char* dtype, const void* from, size_t bytes) {
      slice.push_back({name, dtype, std::vector<char>(bytes)});
      device.download(slice.back().bytes.data(), static_cast<const char*>(from), bytes);
    };
    add("theta", dtype_name<floatX>, params + begin, n * sizeof(floatX));
    for (const State& s : states_)
      add(s.name, s.dtype, static_cast<const char*>(s.data) + (begin - first_) * s.element_bytes, n * s.element_bytes);
    return slice;
  }
  // An empty array leaves what is there.
  void write(floatX* params, size_t begin, const StateSlice& slice, Device& device) {
    const auto set = [&](void* to, const StateArray& array) {
      device.upload(static_cast<char*>(to), array.bytes.data(), array.bytes.size());
    };
    set(params + begin, slice[0]);
    for (size_t i = 0; i < states_.size(); i++)
      set(static_cast<char*>(states_[i].data) + (begin - first_) * states_[i].element_bytes, slice[i + 1]);
  }

  const std::vector<State>& states() const { return states_; }

 protected:
  std::vector<State> states_;
  size_t first_ = 0;  // element of the flat buffer that the states begin with
  Buffer<QualitySums> block_sums_;
};

// One element; gives the intended update. Not written inside the simd loop, since g++ 12 keeps a loop scalar that
// declares variables whose address is taken; here they are gone once the call is inlined.
template <class S, class... T>
[[gnu::always_inline]] inline float adamw_element(const AdamWScalars& k, uint64_t r, const typename S::Theta& grad,
                                                  typename S::Theta& theta, T&... states) {
  float u, theta_now = to_float(theta);
  std::tuple now(to_float(states)...);
  std::apply([&](auto&... s) { S::update(k, r, to_float(grad), u, theta_now, s...), (store_grid(states, s), ...); },
             now);
  store_grid(theta, theta_now);
  return u;
}

// One block on the CPU, in runs that stay in the L1 cache. place: of its first element in the flat buffer. s...: the
// states' elements from there on.
template <class S, bool with_quality, class... T>
QualitySums adamw_block_cpu(const AdamWScalars& scalars, size_t place, const typename S::Theta* __restrict grad,
                            typename S::Theta* __restrict theta, size_t n, T* __restrict... s) {
  constexpr size_t run = UpdateTrace<S>::size;
  constexpr bool bf16_moments = std::is_same_v<std::tuple_element_t<S::second_moment, typename S::States>, bf16>;
  const AdamWScalars k = scalars;  // a local copy can't alias the arrays
  QualitySums sums;
  UpdateTrace<S> trace;
  uint8_t bytes[run];
  uint64_t random[S::stochastic ? run : 1] = {};
  for (size_t begin = 0; begin < n; begin += run) {
    const size_t count = std::min(run, n - begin);
    if constexpr (with_quality) trace.start(count, theta + begin, s + begin...);
    if constexpr (S::stochastic) {
#pragma omp simd
      for (size_t i = 0; i < count; i++) random[i] = random_bits_of(k, place + begin + i);
    }
#pragma omp simd
    for (size_t i = 0; i < count; i++) {
      const float u =
          adamw_element<S>(k, random[S::stochastic ? i : 0], grad[begin + i], theta[begin + i], s[begin + i]...);
      if constexpr (with_quality) trace.u[i] = u;
      // Read by nobody. An array of bytes makes g++ take 32 elements at a time, four AVX2 vectors side by side, where
      // two leave the processor waiting for results: an element's operations are one long chain. 1.94 to 1.63 ns an
      // element for bf16, 2.81 to 2.18 for collage_light, 4.25 to 3.05 for collage_plus, 1.90 to 1.53 for bf16_rem16
      // (Zen 3, one thread, in cache).
      if constexpr (bf16_moments) bytes[i] = static_cast<uint8_t>(grad[begin + i].bits);
    }
    if constexpr (bf16_moments) asm volatile("" : : "r"(bytes) : "memory");  // else the compiler leaves the bytes out
    if constexpr (with_quality) sums += trace.sums(count, k.lw != 0, grad + begin, theta + begin, s + begin...);
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
    this->first_ = part.begin;
    part_.last_block = std::min(part.last_block, blocks.host.size());
    size_t index = 0;
    std::apply(
        [&](auto&... array) {
          (this->states_.push_back({S::state_names[index++], dtype_name<T>, sizeof(T), array.data()}), ...);
        },
        arrays_);
    // A state beside the weight starts as what the weight leaves of itself; all others at 0.
    if constexpr (weight_states == 1) {
      auto& beside = std::get<0>(arrays_);
      std::vector<floatX> theta(part.n());
      std::vector<std::tuple_element_t<0, typename S::States>> first(part.n());
      device.download(theta.data(), params + part.begin, theta.size());
      for (size_t i = 0; i < first.size(); i++) {
        float w = to_float(theta[i]), state = 0;
        S::set(w, w, state);
        store_grid(first[i], state);
      }
      device.upload(beside.data(), first.data(), first.size());
    }
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

  FullValues values(const floatX* params, const size_t* at, size_t n, Device& device) const override {
    StateSlice slice = empty_slice<S>(n);
    gather_to_host(slice[0].bytes.data(), params, 0, at, n, device);
    size_t i = 1;
    std::apply(
        [&](auto&... array) {
          (gather_to_host(slice[i++].bytes.data(), array.data(), part_.begin, at, n, device), ...);
        },
        arrays_);
    return full_values<S>(slice);
  }

 private:
  static constexpr size_t weight_states = S::second_moment - 1;  // before m

  template <bool with_quality>
  void update_cpu(floatX* params, const floatX* grads, const AdamWScalars& k) {
    AdamWScalars no_decay = k;
    no_decay.lw = 0;
#pragma omp parallel for schedule(static)
    for (size_t b = part_.first_block; b < part_.last_block; b++) {
      const Block& block = blocks_.host[b];
      std::apply(
          [&](auto&... array) {
            const QualitySums sums = adamw_block_cpu<S, with_quality>(
                block.decay ? k : no_decay, block.begin, grads + block.begin, params + block.begin, block.n,
                array.data() + (block.begin - part_.begin)...);
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

// The optimizer of that name and mode (--mcf) whose weights are floatX; null where there is none.
template <class floatX>
std::unique_ptr<Optimizer<floatX>> make_optimizer(const std::string& precision, const std::string& mode,
                                                  const floatX* params, const BlockList& blocks, const Part& part,
                                                  Device& device) {
  std::unique_ptr<Optimizer<floatX>> optimizer;
  with_strategy(precision, mode, [&]<class S>() {
    if constexpr (std::is_same_v<typename S::Theta, floatX>)
      optimizer = std::make_unique<AdamW<S>>(params, blocks, part, device);
  });
  return optimizer;
}
