// The precision strategies: one struct each.
//
// A strategy is how its weight is stored (a base below), the list of its per-parameter states (name, element type) and
// update(), AdamW on one element in place. Allocation, the memory table, sharding, checkpoints and the AdamW kernel all
// derive from that list, so a new strategy is one struct here and one row in `Strategies` at the end.
//
// Conventions. In update() every value is a float: a bf16 state lies on the bf16 grid when it comes and must when it
// goes; an integer state is a whole number. theta is the weight that forward and backward see. r: 64 random bits of
// this element and step. u goes out: the intended update, weight decay included, before the state's format rounds it. A
// state that belongs to the weight's full value comes first, the second moment's come last, from index `second_moment`
// on, and m is right before them.
//
// Sources: Collage, arXiv 2405.03637 (its names A to D are quoted); decoupled weight decay, arXiv 1711.05101. eps is
// added after bias correction, as PyTorch's AdamW does. Decay is a part of u: as theta *= 1 - lr*wd it would be a
// silent no-op in bf16 once lr*wd < 2^-9.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>

#include "mcf/expansion.h"
#include "runtime/random.h"

// What AdamW needs that changes per step or never, computed in double and rounded to fp32 once.
struct AdamWScalars {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
  float beta2_hi, beta2_lo;  // beta2 as a pair of bf16
  float a1;                  // lr / (1 - beta1^t)
  float r2;                  // 1 / sqrt(1 - beta2^t)
  float lw;                  // lr * weight decay; 0 for tensors that are not decayed
  float clip;                // scales the gradient, <= 1
  uint64_t random;           // key of the step's random bits
};

// 64 random bits of an element, given its place in the flat buffer, which names tensor and index whatever the rank or
// the sharding: mix64 is a bijection, so no two elements share theirs. A state takes 16 bits of its own.
__host__ __device__ inline uint64_t random_bits_of(const AdamWScalars& k, size_t place) {
  return mix64(k.random + place);
}

// What the gradient is scaled by: 1 unless grad_clip > 0 and the norm of the whole model's gradient is larger.
__host__ __device__ inline float clip_factor(double grad_clip, double norm) {
  return grad_clip > 0 && norm > grad_clip ? static_cast<float>(grad_clip / norm) : 1.0f;
}

// t: updates done, this one included (1 at the first). norm: the gradient norm of the whole model, or 0 where clipping
// is decided later, on the device. seed: of the random bits.
inline AdamWScalars adamw_scalars(double lr, double beta1, double beta2, double eps, double weight_decay,
                                  double grad_clip, double norm, int64_t t, uint64_t seed = 0) {
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
  k.random = random_bits(seed, ~uint64_t{1}, static_cast<uint64_t>(t));
  return k;
}

// ---------------------------------------------------------------------------------------------------------------------
// How a weight is stored: theta, and perhaps one state beside it. load() and store() are the register form's; value()
// is the full value exactly, and set() the nearest to it that can be stored.

struct StrategyDefaults {
  static constexpr const char* mode = "strict";  // which --mcf takes this struct
  static constexpr bool stochastic = false;      // update() reads r
  static constexpr bool reads_theta = true;      // else theta is written only
};

struct PlainWeight : StrategyDefaults {  // one bf16 number
  static constexpr int resolution = 9;
  __host__ __device__ static double value(float theta, float) { return theta; }
  static void set(double w, float& theta, float&) { theta = rn(static_cast<float>(w)); }
};

struct PairWeight : StrategyDefaults {  // two bf16 numbers, hi + lo
  static constexpr int resolution = 17;
  __host__ __device__ static float load(float hi, float lo) { return add_rn(hi, lo); }
  __host__ __device__ static void store(float w, float& hi, float& lo) { hi = rn(w), lo = rn(sub_rn(w, hi)); }
  __host__ __device__ static double value(float hi, float lo) { return static_cast<double>(hi) + lo; }
  static void set(double w, float& hi, float& lo) {
    hi = rn(static_cast<float>(w));
    lo = rn(static_cast<float>(w - hi));
  }
};

struct MasterWeight : StrategyDefaults {  // bf16, and the weight itself in fp32
  static constexpr int resolution = 24;
  static constexpr bool reads_theta = false;
  __host__ __device__ static double value(float, float master) { return master; }
  static void set(double w, float& theta, float& master) { master = static_cast<float>(w), theta = rn(master); }
};

// bf16 and an int16 that together are exactly an fp32 number: theta is its upper half, rounded by the sign of the lower
// (halves away from zero).
struct Rem16Weight : StrategyDefaults {
  static constexpr int resolution = 24;
  __host__ __device__ static float load(float theta, float rem) {
    const int low = static_cast<int>(rem);
    return bits_float((float_bits(theta) - (low < 0 ? 0x10000u : 0u)) | (static_cast<uint32_t>(low) & 0xffffu));
  }
  __host__ __device__ static void store(float w, float& theta, float& rem) {
    uint32_t u = float_bits(w);
    u = (u & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : u;  // a GPU's NaN, 0x7fffffff, would round up to -0
    const int low = static_cast<int>(u << 16) >> 16;
    theta = bits_float((u & 0xffff0000u) + (low < 0 ? 0x10000u : 0u));
    rem = static_cast<float>(low);
  }
  __host__ __device__ static double value(float theta, float rem) { return load(theta, rem); }
  static void set(double w, float& theta, float& rem) { store(static_cast<float>(w), theta, rem); }
};

// bf16 and an int8 that counts 127ths of half an ulp of it.
struct Int8Weight : StrategyDefaults {
  static constexpr int resolution = 16;
  // Exponent field e means 2^(e - 127): half an ulp is 2^-8 of that, also for 0 and subnormals, whose ulp is that of e
  // = 1.
  __host__ __device__ static float half_ulp(float theta) {
    const uint32_t field = float_bits(theta) & 0x7f800000u, least = 1u << 23, largest = 254u << 23;
    return mul_rn(bits_float(field < least ? least : field > largest ? largest : field), 0x1p-8f);
  }
  __host__ __device__ static float load(float theta, float rho) {
    return add_rn(theta, mul_rn(div_rn(rho, 127.0f), half_ulp(theta)));
  }
  __host__ __device__ static void store(float w, float& theta, float& rho) {
    theta = rn(w);
    float x = mul_rn(127.0f, div_rn(sub_rn(w, theta), half_ulp(theta)));
    const float size = bits_float(float_bits(x) & 0x7fffffffu);
    x = size <= 0x1.fffffep127f ? x : 0.0f;
    x = x < -127.0f ? -127.0f : x > 127.0f ? 127.0f : x;
    rho = sub_rn(add_rn(x, 0x1.8p23f), 0x1.8p23f);  // to a whole number, ties to even: floats there are whole
  }
  __host__ __device__ static double value(float theta, float rho) { return load(theta, rho); }
  static void set(double w, float& theta, float& rho) { store(static_cast<float>(w), theta, rho); }
};

struct Fp32Weight : StrategyDefaults {  // fp32, which the model sees as it is
  static constexpr int resolution = 24;
  __host__ __device__ static double value(float theta, float) { return theta; }
  static void set(double w, float& theta, float&) { theta = static_cast<float>(w); }
};

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
struct Bf16 : PlainWeight {
  static constexpr const char* name = "bf16";
  static constexpr const char* meaning = "bf16 weights and states";
  using Theta = bf16;
  using States = std::tuple<bf16, bf16>;
  static constexpr std::array state_names = {"m", "v"};
  static constexpr int second_moment = 1;
  __host__ __device__ static void update(const AdamWScalars& k, uint64_t, float g, float& u, float& theta, float& m,
                                         float& v) {
    g = strict::clipped(k, g);
    strict::first_moment(k, g, m);
    strict::second_moment(k, g, v);
    u = strict::intended_update(k, theta, m, v);
    theta = rn_grid(add_rn(theta, u));
  }
};

// BF16-Kahan: the weight has a compensation, what its last sum lost, added to the next update (Kahan 1965; for training
// Zamirai et al., arXiv 2010.06192). As close as collage_light: a Fast2Sum, inexact where |compensation| > |theta|. v
// is plain bf16, with what that means (see CollageLight).
struct Bf16Kahan : PairWeight {
  static constexpr const char* name = "bf16_kahan";
  static constexpr const char* meaning = "bf16 weights with a bf16 compensation, bf16 states";
  using Theta = bf16;
  using States = std::tuple<bf16, bf16, bf16>;
  static constexpr std::array state_names = {"theta.lo", "m", "v"};
  static constexpr int second_moment = 2;
  __host__ __device__ static void update(const AdamWScalars& k, uint64_t, float g, float& u, float& theta, float& lo,
                                         float& m, float& v) {
    g = strict::clipped(k, g);
    strict::first_moment(k, g, m);
    strict::second_moment(k, g, v);
    u = strict::intended_update(k, theta, m, v);
    lo = rn_grid(add_rn(lo, u));
    const float sum = rn_grid(add_rn(theta, lo));
    lo = rn_grid(add_rn(lo, rn_grid(sub_rn(theta, sum))));
    theta = sum;
  }
};

// B, Collage-light: the weight is a pair, grown by u. Keeps updates down to 2^-17 of the weight. v is plain bf16 and
// cannot shrink once beta2 rounds to 1 (.999), nor track well at .99.
struct CollageLight : PairWeight {
  static constexpr const char* name = "collage_light";
  static constexpr const char* meaning = "bf16 pair weights, bf16 states";
  using Theta = bf16;
  using States = std::tuple<bf16, bf16, bf16>;
  static constexpr std::array state_names = {"theta.lo", "m", "v"};
  static constexpr int second_moment = 2;
  __host__ __device__ static void update(const AdamWScalars& k, uint64_t, float g, float& u, float& theta,
                                         float& theta_lo, float& m, float& v) {
    g = strict::clipped(k, g);
    strict::first_moment(k, g, m);
    strict::second_moment(k, g, v);
    u = strict::intended_update(k, theta, m, v);
    mcf::grow(theta, theta_lo, u);
  }
};

// C, Collage-plus: as light, and v is a pair multiplied by beta2 as a pair. Tracks the second moment at every beta2.
struct CollagePlus : PairWeight {
  static constexpr const char* name = "collage_plus";
  static constexpr const char* meaning = "bf16 pair weights and second moment";
  using Theta = bf16;
  using States = std::tuple<bf16, bf16, bf16, bf16>;
  static constexpr std::array state_names = {"theta.lo", "m", "v", "v.lo"};
  static constexpr int second_moment = 2;
  __host__ __device__ static void update(const AdamWScalars& k, uint64_t, float g, float& u, float& theta,
                                         float& theta_lo, float& m, float& v, float& v_lo) {
    g = strict::clipped(k, g);
    strict::first_moment(k, g, m);
    mcf::mul(v, v_lo, k.beta2_hi, k.beta2_lo);
    mcf::grow(v, v_lo, rn_grid(mul_rn(k.one_minus_beta2, mul_rn(g, g))));
    u = strict::intended_update(k, theta, m, v);
    mcf::grow(theta, theta_lo, u);
  }
};

// Collage-plus as the paper's released code computes it: see mcf::mul_as_released. For comparisons with published runs.
struct CollagePlusAsReleased : CollagePlus {
  static constexpr const char* mode = "as-released";
  __host__ __device__ static void update(const AdamWScalars& k, uint64_t, float g, float& u, float& theta,
                                         float& theta_lo, float& m, float& v, float& v_lo) {
    g = strict::clipped(k, g);
    strict::first_moment(k, g, m);
    mcf::mul_as_released(v, v_lo, k.beta2_hi, k.beta2_lo);
    mcf::grow(v, v_lo, rn_grid(mul_rn(k.one_minus_beta2, mul_rn(g, g))));
    u = strict::intended_update(k, theta, m, v);
    mcf::grow(theta, theta_lo, u);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Register form: fp32 arithmetic without intermediate rounding; what differs is how the results are stored. For the
// four strategies above it is --mcf=fused: their bytes and traffic, and a closer second moment, of collage_plus by
// much (docs/precision.md).

__host__ __device__ inline void register_update(const AdamWScalars& k, float g, float& u, float& w, float& m,
                                                float& v) {
  g = mul_rn(k.clip, g);
  m = add_rn(mul_rn(k.beta1, m), mul_rn(k.one_minus_beta1, g));
  v = add_rn(mul_rn(k.beta2, v), mul_rn(k.one_minus_beta2, mul_rn(g, g)));
  u = sub_rn(-div_rn(mul_rn(k.a1, m), add_rn(mul_rn(sqrt_rn(v), k.r2), k.eps)), mul_rn(k.lw, w));
  w = add_rn(w, u);
}

// A weight stored by S, moments rounded to bf16 once.
template <class S>
__host__ __device__ inline void bf16_moments_update(const AdamWScalars& k, float g, float& u, float& theta,
                                                    float& beside, float& m, float& v) {
  float w = S::load(theta, beside);
  register_update(k, g, u, w, m, v);
  S::store(w, theta, beside);
  m = rn(m), v = rn(v);
}

struct Bf16Fused : Bf16 {
  static constexpr const char* mode = "fused";
  __host__ __device__ static void update(const AdamWScalars& k, uint64_t, float g, float& u, float& theta, float& m,
                                         float& v) {
    register_update(k, g, u, theta, m, v);
    theta = rn(theta), m = rn(m), v = rn(v);
  }
};

template <class S>  // Bf16Kahan or CollageLight: rounded once they are the same
struct PairFused : S {
  static constexpr const char* mode = "fused";
  __host__ __device__ static void update(const AdamWScalars& k, uint64_t, float g, float& u, float& theta,
                                         float& theta_lo, float& m, float& v) {
    bf16_moments_update<PairWeight>(k, g, u, theta, theta_lo, m, v);
  }
};

struct CollagePlusFused : CollagePlus {
  static constexpr const char* mode = "fused";
  __host__ __device__ static void update(const AdamWScalars& k, uint64_t, float g, float& u, float& theta,
                                         float& theta_lo, float& m, float& v, float& v_lo) {
    float w = load(theta, theta_lo), second = load(v, v_lo);
    register_update(k, g, u, w, m, second);
    store(w, theta, theta_lo);
    store(second, v, v_lo);
    m = rn(m);
  }
};

// Everything bf16, rounded at random: up or down with the probability that makes the mean right. Nothing is lost on
// average, at the price of noise of an ulp in weight and states, which does not shrink with the learning rate.
struct Bf16Sr : PlainWeight {
  static constexpr const char* name = "bf16_sr";
  static constexpr const char* meaning = "bf16 weights and states, stochastic rounding";
  static constexpr bool stochastic = true;
  using Theta = bf16;
  using States = std::tuple<bf16, bf16>;
  static constexpr std::array state_names = {"m", "v"};
  static constexpr int second_moment = 1;
  // Adds 16 random bits below the last one kept, and cuts. A value on the grid stays; inf and NaN do.
  __host__ __device__ static float round(float x, uint64_t r) {
    const uint32_t u = float_bits(x);
    const float cut = bits_float((u + static_cast<uint32_t>(r & 0xffffu)) & 0xffff0000u);
    return (u & 0x7fffffffu) >= 0x7f800000u ? rn(x) : cut;
  }
  __host__ __device__ static void update(const AdamWScalars& k, uint64_t r, float g, float& u, float& theta, float& m,
                                         float& v) {
    register_update(k, g, u, theta, m, v);
    theta = round(theta, r), m = round(m, r >> 16), v = round(v, r >> 32);
  }
};

// bf16 weights, whose low half of an fp32 number lies beside them: exactly an fp32 master, in 2 bytes in place of 4. v
// is bf16, rounded once: it stalls at beta2 .99 and .999 as collage_light's does.
struct Bf16Rem16 : Rem16Weight {
  static constexpr const char* name = "bf16_rem16";
  static constexpr const char* meaning = "bf16 weights with the rest of an fp32 number, bf16 states";
  using Theta = bf16;
  using States = std::tuple<int16_t, bf16, bf16>;
  static constexpr std::array state_names = {"theta.rem", "m", "v"};
  static constexpr int second_moment = 2;
  __host__ __device__ static void update(const AdamWScalars& k, uint64_t, float g, float& u, float& theta, float& rem,
                                         float& m, float& v) {
    bf16_moments_update<Rem16Weight>(k, g, u, theta, rem, m, v);
  }
};

// The same with 8 bits in place of 16: keeps updates down to 2^-16 of the weight. v as in rem16.
struct Bf16Int8 : Int8Weight {
  static constexpr const char* name = "bf16_int8";
  static constexpr const char* meaning = "bf16 weights with 8 bits more, bf16 states";
  using Theta = bf16;
  using States = std::tuple<int8_t, bf16, bf16>;
  static constexpr std::array state_names = {"theta.rho", "m", "v"};
  static constexpr int second_moment = 2;
  __host__ __device__ static void update(const AdamWScalars& k, uint64_t, float g, float& u, float& theta, float& rho,
                                         float& m, float& v) {
    bf16_moments_update<Int8Weight>(k, g, u, theta, rho, m, v);
  }
};

// D^-MW: fp32 states, but no master weights. The moments are right and the weights lose what plain bf16 loses.
struct Fp32Optim : PlainWeight {
  static constexpr const char* name = "fp32_optim";
  static constexpr const char* meaning = "bf16 weights, fp32 states";
  using Theta = bf16;
  using States = std::tuple<float, float>;
  static constexpr std::array state_names = {"m", "v"};
  static constexpr int second_moment = 1;
  __host__ __device__ static void update(const AdamWScalars& k, uint64_t, float g, float& u, float& theta, float& m,
                                         float& v) {
    register_update(k, g, u, theta, m, v);
    theta = rn(theta);
  }
};

// D: bf16 weights for the model, an fp32 master copy and fp32 states for the optimizer. The usual mixed precision
// (Micikevicius et al., arXiv 1710.03740). Loses updates below 2^-24 of the weight.
struct Fp32Master : MasterWeight {
  static constexpr const char* name = "fp32_master";
  static constexpr const char* meaning = "bf16 weights, fp32 master weights and states";
  using Theta = bf16;
  using States = std::tuple<float, float, float>;
  static constexpr std::array state_names = {"master", "m", "v"};
  static constexpr int second_moment = 2;
  __host__ __device__ static void update(const AdamWScalars& k, uint64_t, float g, float& u, float& theta,
                                         float& master, float& m, float& v) {
    register_update(k, g, u, master, m, v);
    theta = rn(master);
  }
};

// The reference: fp32 weights, gradients and states.
struct Fp32 : Fp32Weight {
  static constexpr const char* name = "fp32";
  static constexpr const char* meaning = "fp32 throughout";
  using Theta = float;
  using States = std::tuple<float, float>;
  static constexpr std::array state_names = {"m", "v"};
  static constexpr int second_moment = 1;
  __host__ __device__ static void update(const AdamWScalars& k, uint64_t, float g, float& u, float& theta, float& m,
                                         float& v) {
    register_update(k, g, u, theta, m, v);
  }
};

// ---------------------------------------------------------------------------------------------------------------------

using Strategies =
    std::tuple<Bf16, Bf16Kahan, Bf16Sr, CollageLight, CollagePlus, Fp32Optim, Fp32Master, Bf16Rem16, Bf16Int8, Fp32>;
// What --mcf changes.
using Variants =
    std::tuple<Bf16Fused, PairFused<Bf16Kahan>, PairFused<CollageLight>, CollagePlusFused, CollagePlusAsReleased>;
using AllStrategies = decltype(std::tuple_cat(Strategies(), Variants()));
// "collage_plus", "collage_plus:fused".
template <class S>
std::string label() {
  return S::mode == std::string("strict") ? S::name : std::string(S::name) + ":" + S::mode;
}

// Calls f.operator()<S>() for the strategy of that name, in that mode where it has one, and returns true; false where
// there is none.
template <class F>
bool with_strategy(const std::string& name, const std::string& mode, F&& f) {
  const auto first_of = [&]<class... S>(std::tuple<S...>*, auto&& matches) {
    return ((matches.template operator()<S>() && (f.template operator()<S>(), true)) || ...);
  };
  return first_of(static_cast<Variants*>(nullptr), [&]<class S>() { return name == S::name && mode == S::mode; }) ||
         first_of(static_cast<Strategies*>(nullptr), [&]<class S>() { return name == S::name; });
}

// Bytes per parameter: weight, gradient and states.
template <class S>
constexpr int bytes_per_parameter() {
  return static_cast<int>(2 * sizeof(typename S::Theta)) + []<class... T>(std::tuple<T...>*) {
    return static_cast<int>((sizeof(T) + ... + 0));
  }(static_cast<typename S::States*>(nullptr));
}

// Bytes that an AdamW pass must move for a parameter: the gradient is read, weight and states are read and written.
template <class S>
constexpr int moved_bytes() {
  constexpr int x = sizeof(typename S::Theta);
  return 2 * bytes_per_parameter<S>() - x - (S::reads_theta ? 0 : x);
}
