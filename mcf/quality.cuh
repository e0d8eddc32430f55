// Quality of an update: how much of what the optimizer intended reached the stored weights.
//
// For an element, u is the intended update and E = value(after) - value(before), once of the full value (hi + lo, or
// the master copy) and once, suffix _hi, of theta alone, the weight that the model sees. The sums run inside the AdamW
// pass. Effective descent quality, <u,E> / |u|^2, is Collage's EDQ (arXiv 2405.03637, section 4.2, which divides by |u|
// once), normalised so that 1 means nothing was lost. It judges storage only: an update made from a wrong v still
// gives 1.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>

#include "mcf/bf16.h"

// Sums over elements.
struct QualitySums {
  double uu = 0, ue = 0, ee = 0, ue_hi = 0, ee_hi = 0;
  double decay = 0, lost_decay = 0;  // theta^2 of decayed weights, and of those of them with E = 0
  int64_t intended = 0;              // u != 0
  int64_t lost = 0;                  // of those: E = 0
  int64_t lost_hi = 0;               // of those: theta unchanged
  int64_t fed = 0;                   // g != 0
  int64_t stale_v = 0;               // of those: second moment (and its low part) unchanged

  void operator+=(const QualitySums& o) {
    uu += o.uu, ue += o.ue, ee += o.ee, ue_hi += o.ue_hi, ee_hi += o.ee_hi;
    decay += o.decay, lost_decay += o.lost_decay;
    intended += o.intended, lost += o.lost, lost_hi += o.lost_hi, fed += o.fed, stale_v += o.stale_v;
  }
  // NaN where |u| = 0: there was nothing to lose.
  double edq() const { return uu > 0 ? ue / uu : std::nan(""); }
  double edq_hi() const { return uu > 0 ? ue_hi / uu : std::nan(""); }
  double update_norm() const { return std::sqrt(uu); }
  double effective_norm() const { return std::sqrt(ee); }
  double effective_norm_hi() const { return std::sqrt(ee_hi); }
  // Shares; 0 where there are none to count.
  double lost_frac() const { return share(lost, intended); }
  double lost_frac_hi() const { return share(lost_hi, intended); }
  double stale_v_frac() const { return share(stale_v, fed); }
  // Decay takes 2 lr wd theta^2 off a weight's square in a step: the share of that which falls on weights that did not
  // move at all. 0 where nothing decays.
  double lost_decay_frac() const { return decay > 0 ? lost_decay / decay : 0.0; }

 private:
  static double share(int64_t part, int64_t of) {
    return of > 0 ? static_cast<double>(part) / static_cast<double>(of) : 0.0;
  }
};

inline QualitySums total(const std::vector<QualitySums>& blocks) {
  QualitySums sums;
  for (const auto& block : blocks) sums += block;
  return sums;
}

// What a run of elements intended, was before and became: kept in the L1 cache between the update and the sums.
template <class S>
struct UpdateTrace {
  using Theta = typename S::Theta;
  using V = std::tuple_element_t<S::second_moment, typename S::States>;
  static constexpr size_t size = 256;
  static constexpr int moments = std::tuple_size_v<typename S::States> - S::second_moment;  // v, or v and its low part
  // The weight in fp32: a loop that mixes bf16 and double takes 16 elements at a time, and its sums no longer fit in
  // the registers (collage_light: 1.95 against 1.4 ns an element for trace and sums, Zen 3).
  struct Weight {
    float theta[size], first[size];  // theta, and the first state, which may belong to the weight's full value
  };
  float u[size];
  Weight before, after;
  V v[moments][size];  // before

  template <class First, class... T>
  static void keep(Weight& to, size_t n, const Theta* theta, const First* first, const T*...) {
#pragma omp simd
    for (size_t i = 0; i < n; i++) to.theta[i] = to_float(theta[i]);
#pragma omp simd
    for (size_t i = 0; i < n; i++) to.first[i] = to_float(first[i]);
  }

  // Keeps what n elements are before their update.
  template <class... T>
  void start(size_t n, const Theta* theta, const T*... s) {
    keep(before, n, theta, s...);
    const std::tuple states(s...);
    std::copy_n(std::get<S::second_moment>(states), n, v[0]);
    if constexpr (moments == 2) std::copy_n(std::get<S::second_moment + 1>(states), n, v[1]);
  }

  // The sums over n elements whose weight and states have become theta and s...; decayed: whether they are.
  template <class... T>
  QualitySums sums(size_t n, bool decayed, const Theta* grad, const Theta* theta, const T*... s) {
    keep(after, n, theta, s...);
    double uu = 0, ue = 0, ee = 0, ue_hi = 0, ee_hi = 0;
    int intended = 0, lost = 0, lost_hi = 0, fed = 0, stale_v = 0;
    int kept[size];
#pragma omp simd reduction(+ : uu, ue, ee, ue_hi, ee_hi)
    for (size_t i = 0; i < n; i++) {
      const double ud = u[i], e_hi = static_cast<double>(after.theta[i]) - before.theta[i];
      const double e = S::value(after.theta[i], after.first[i]) - S::value(before.theta[i], before.first[i]);
      uu += ud * ud, ue += ud * e, ee += e * e, ue_hi += ud * e_hi, ee_hi += e_hi * e_hi;
      kept[i] = e == 0;
    }
#pragma omp simd reduction(+ : intended, lost, lost_hi)
    for (size_t i = 0; i < n; i++) {
      const int wanted = u[i] != 0;
      intended += wanted, lost += wanted & kept[i], lost_hi += wanted & (after.theta[i] == before.theta[i]);
    }
    double decay = 0, lost_decay = 0;
    if (decayed) {
#pragma omp simd reduction(+ : decay, lost_decay)
      for (size_t i = 0; i < n; i++) {
        const double square = static_cast<double>(before.theta[i]) * before.theta[i];
        decay += square, lost_decay += kept[i] ? square : 0.0;
      }
    }
    const std::tuple states(s...);
    const V* v_now = std::get<S::second_moment>(states);
    const V* v_low = std::get<S::second_moment + moments - 1>(states);  // v itself where it has no low part
#pragma omp simd reduction(+ : fed, stale_v)
    for (size_t i = 0; i < n; i++) {
      const int gave = to_float(grad[i]) != 0;
      const int same = (to_float(v_now[i]) == to_float(v[0][i])) & (to_float(v_low[i]) == to_float(v[moments - 1][i]));
      fed += gave, stale_v += gave & same;
    }
    return {uu, ue, ee, ue_hi, ee_hi, decay, lost_decay, intended, lost, lost_hi, fed, stale_v};
  }
};
