// The precision strategies: one struct each.
//
// A strategy is the list of its per-parameter states (name, element type) and update(), AdamW on one element in place.
// Allocation, the memory table, sharding, checkpoints and the AdamW kernel all derive from that list, so a new strategy
// is one struct here and one row in `Strategies` below.
//
// Conventions. In update() every value is a float: a bf16 state lies on the bf16 grid when it comes and must when it
// goes. theta is the weight that forward and backward see. u goes out: the intended update, weight decay included,
// before the state's format rounds it. States that belong to the weight's full value come first, the second moment's
// come last, from index `second_moment` on. value() is the full value of the weight, from theta and the first state.
//
// Sources: Collage, arXiv 2405.03637 (its names A to D are quoted); decoupled weight decay, arXiv 1711.05101. eps is
// added after bias correction, as PyTorch's AdamW does. Decay is a part of u: as theta *= 1 - lr*wd it would be a
// silent no-op in bf16 once lr*wd < 2^-9.
#pragma once
#include <array>
#include <cmath>
#include <string>
#include <string_view>
#include <tuple>

#include "mcf/expansion.h"

// What AdamW needs that changes per step or never, computed in double and rounded to fp32 once.
struct AdamWScalars {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
  float beta2_hi, beta2_lo;  // beta2 as a pair of bf16
  float a1;                  // lr / (1 - beta1^t)
  float r2;                  // 1 / sqrt(1 - beta2^t)
  float lw;                  // lr * weight decay; 0 for tensors that are not decayed
  float clip;                // scales the gradient, <= 1
};

// What the gradient is scaled by: 1 unless grad_clip > 0 and the norm of the whole model's gradient is larger.
__host__ __device__ inline float clip_factor(double grad_clip, double norm) {
  return grad_clip > 0 && norm > grad_clip ? static_cast<float>(grad_clip / norm) : 1.0f;
}

// t: updates done, this one included (1 at the first). norm: the gradient norm of the whole model, or 0 where clipping
// is decided later, on the device.
inline AdamWScalars adamw_scalars(double lr, double beta1, double beta2, double eps, double weight_decay,
                                  double grad_clip, double norm, int64_t t) {
  AdamWScalars k;
  k.beta1 = static_cast<float>(beta1);
  k.one_minus_beta1 = static_cast<float>(1.0 - beta1);
  k.beta2 = static_cast<float>(beta2);
  k.one_minus_beta2 = static_cast<float>(1.0 - beta2);
  k.eps = static_cast<float>(eps);
  k.beta2_hi = rn(static_cast<float>(beta2));
  k.beta2_lo = rn(static_cast<float>(beta2 - static_cast<double>(k.beta2_hi)));
  k.a1 = static_cast<float>(lr / (1.0 - std::pow(beta1, static_cast<double>(t))));
  k.r2 = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, static_cast<double>(t))));
  k.lw = static_cast<float>(lr * weight_decay);
  k.clip = clip_factor(grad_clip, norm);
  return k;
}

// ---------------------------------------------------------------------------------------------------------------------
// Strict mode: every operation of the paper's algorithm rounds to bf16.

namespace strict {
// g itself where clip is 1.
__host__ __device__ inline float clipped(const AdamWScalars& k, float g) { return rn_grid(mul_rn(k.clip, g)); }
__host__ __device__ inline void first_moment(const AdamWScalars& k, float g, float& m) {
  m = rn_grid(add_rn(rn_grid(mul_rn(k.beta1, m)), mul_rn(k.one_minus_beta1, g)));
}
__host__ __device__ inline void second_moment(const AdamWScalars& k, float g, float& v) {
  v = rn_grid(add_rn(rn_grid(mul_rn(k.beta2, v)), mul_rn(k.one_minus_beta2, mul_rn(g, g))));
}
__host__ __device__ inline float intended_update(const AdamWScalars& k, float theta, float m, float v) {
  const float d = rn_grid(add_rn(rn_grid(mul_rn(rn_grid(sqrt_rn(v)), k.r2)), k.eps));
  return rn_grid(sub_rn(-rn_grid(div_rn(rn_grid(mul_rn(k.a1, m)), d)), rn_grid(mul_rn(k.lw, theta))));
}
}  // namespace strict

// A: everything bf16. Loses every update below half an ulp of the weight (|u| < 2^-9 |theta|): most of them at usual
// learning rates, all of them for a LayerNorm weight at 1.0 once lr < 2^-9.
struct Bf16 {
  static constexpr const char* name = "bf16";
  static constexpr const char* meaning = "bf16 weights and states";
  using Theta = bf16;
  using States = std::tuple<bf16, bf16>;
  static constexpr std::array state_names = {"m", "v"};
  static constexpr int second_moment = 1;
  __host__ __device__ static void update(const AdamWScalars& k, float g, float& u, float& theta, float& m, float& v) {
    g = strict::clipped(k, g);
    strict::first_moment(k, g, m);
    strict::second_moment(k, g, v);
    u = strict::intended_update(k, theta, m, v);
    theta = rn_grid(add_rn(theta, u));
  }
  __host__ __device__ static double value(float theta, float) { return theta; }
};

// B, Collage-light: the weight is a pair, grown by u. Keeps updates down to 2^-17 of the weight. v is plain bf16 and
// cannot shrink once beta2 rounds to 1 (.999), nor track well at .99.
struct CollageLight {
  static constexpr const char* name = "collage_light";
  static constexpr const char* meaning = "bf16 pair weights, bf16 states";
  using Theta = bf16;
  using States = std::tuple<bf16, bf16, bf16>;
  static constexpr std::array state_names = {"theta.lo", "m", "v"};
  static constexpr int second_moment = 2;
  __host__ __device__ static void update(const AdamWScalars& k, float g, float& u, float& theta, float& theta_lo,
                                         float& m, float& v) {
    g = strict::clipped(k, g);
    strict::first_moment(k, g, m);
    strict::second_moment(k, g, v);
    u = strict::intended_update(k, theta, m, v);
    mcf::grow(theta, theta_lo, u);
  }
  __host__ __device__ static double value(float theta, float theta_lo) { return static_cast<double>(theta) + theta_lo; }
};

// C, Collage-plus: as light, and v is a pair multiplied by beta2 as a pair. Tracks the second moment at every beta2.
struct CollagePlus {
  static constexpr const char* name = "collage_plus";
  static constexpr const char* meaning = "bf16 pair weights and second moment";
  using Theta = bf16;
  using States = std::tuple<bf16, bf16, bf16, bf16>;
  static constexpr std::array state_names = {"theta.lo", "m", "v", "v.lo"};
  static constexpr int second_moment = 2;
  __host__ __device__ static void update(const AdamWScalars& k, float g, float& u, float& theta, float& theta_lo,
                                         float& m, float& v, float& v_lo) {
    g = strict::clipped(k, g);
    strict::first_moment(k, g, m);
    mcf::mul(v, v_lo, k.beta2_hi, k.beta2_lo);
    mcf::grow(v, v_lo, rn_grid(mul_rn(k.one_minus_beta2, mul_rn(g, g))));
    u = strict::intended_update(k, theta, m, v);
    mcf::grow(theta, theta_lo, u);
  }
  __host__ __device__ static double value(float theta, float theta_lo) { return static_cast<double>(theta) + theta_lo; }
};

// ---------------------------------------------------------------------------------------------------------------------
// Register form: fp32 arithmetic without intermediate rounding; what differs is how the results are stored.

__host__ __device__ inline void register_update(const AdamWScalars& k, float g, float& u, float& w, float& m,
                                                float& v) {
  g = mul_rn(k.clip, g);
  m = add_rn(mul_rn(k.beta1, m), mul_rn(k.one_minus_beta1, g));
  v = add_rn(mul_rn(k.beta2, v), mul_rn(k.one_minus_beta2, mul_rn(g, g)));
  u = sub_rn(-div_rn(mul_rn(k.a1, m), add_rn(mul_rn(sqrt_rn(v), k.r2), k.eps)), mul_rn(k.lw, w));
  w = add_rn(w, u);
}

// D: bf16 weights for the model, an fp32 master copy and fp32 states for the optimizer. The usual mixed precision.
struct Fp32Master {
  static constexpr const char* name = "fp32_master";
  static constexpr const char* meaning = "bf16 weights, fp32 master weights and states";
  using Theta = bf16;
  using States = std::tuple<float, float, float>;
  static constexpr std::array state_names = {"master", "m", "v"};
  static constexpr int second_moment = 2;
  __host__ __device__ static void update(const AdamWScalars& k, float g, float& u, float& theta, float& master,
                                         float& m, float& v) {
    register_update(k, g, u, master, m, v);
    theta = rn(master);
  }
  __host__ __device__ static double value(float, float master) { return master; }
};

// The reference: fp32 weights, gradients and states.
struct Fp32 {
  static constexpr const char* name = "fp32";
  static constexpr const char* meaning = "fp32 throughout";
  using Theta = float;
  using States = std::tuple<float, float>;
  static constexpr std::array state_names = {"m", "v"};
  static constexpr int second_moment = 1;
  __host__ __device__ static void update(const AdamWScalars& k, float g, float& u, float& theta, float& m, float& v) {
    register_update(k, g, u, theta, m, v);
  }
  __host__ __device__ static double value(float theta, float) { return theta; }
};

// ---------------------------------------------------------------------------------------------------------------------

using Strategies = std::tuple<Bf16, CollageLight, CollagePlus, Fp32Master, Fp32>;

// Calls f.operator()<S>() for the strategy of that name and returns true; false where there is none.
template <class F>
bool with_strategy(const std::string& name, F&& f) {
  return [&]<class... S>(std::tuple<S...>*) {
    return ((name == S::name && (f.template operator()<S>(), true)) || ...);
  }(static_cast<Strategies*>(nullptr));
}

// Starts a state that mirrors the weight at the weight, every other at 0.
constexpr bool starts_as_theta(std::string_view state_name) { return state_name == "master"; }

// Bytes per parameter: weight, gradient and states.
template <class S>
constexpr int bytes_per_parameter() {
  return static_cast<int>(2 * sizeof(typename S::Theta)) + []<class... T>(std::tuple<T...>*) {
    return static_cast<int>((sizeof(T) + ... + 0));
  }(static_cast<typename S::States*>(nullptr));
}
