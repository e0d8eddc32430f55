// Quality of an update: how much of what the optimizer intended reached the stored weights.
//
// For an element, u is the intended update and E = value(after) - value(before), once of the full value (hi + lo, or
// the master copy) and once, suffix _hi, of theta alone, the weight that the model sees. The sums run inside the AdamW
// pass. Effective descent quality, <u,E> / |u|^2, is Collage's EDQ (arXiv 2405.03637, section 4.2, which divides by |u|
// once), normalised so that 1 means nothing was lost. It judges storage only: an update made from a wrong v still
// gives 1.
#pragma once
#include <cmath>
#include <cstdint>

// Sums over elements.
struct QualitySums {
  double uu = 0, ue = 0, ee = 0, ue_hi = 0, ee_hi = 0;
  int64_t intended = 0;  // u != 0
  int64_t lost = 0;      // of those: E = 0
  int64_t lost_hi = 0;   // of those: theta unchanged
  int64_t fed = 0;       // g != 0
  int64_t stale_v = 0;   // of those: second moment (and its low part) unchanged

  void operator+=(const QualitySums& o) {
    uu += o.uu, ue += o.ue, ee += o.ee, ue_hi += o.ue_hi, ee_hi += o.ee_hi;
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

 private:
  static double share(int64_t part, int64_t of) {
    return of > 0 ? static_cast<double>(part) / static_cast<double>(of) : 0.0;
  }
};

// What a run of elements intended and did, kept in the L1 cache between the update and the sums.
struct UpdateTrace {
  static constexpr size_t size = 256;
  float g[size], u[size];
  double e[size], e_hi[size];
  int v_moved[size];

  QualitySums sums(size_t n) const {
    double uu = 0, ue = 0, ee = 0, ue_hi = 0, ee_hi = 0;
    int intended = 0, lost = 0, lost_hi = 0, fed = 0, stale_v = 0;
#pragma omp simd reduction(+ : uu, ue, ee, ue_hi, ee_hi)
    for (size_t i = 0; i < n; i++) {
      const double ud = u[i];
      uu += ud * ud, ue += ud * e[i], ee += e[i] * e[i], ue_hi += ud * e_hi[i], ee_hi += e_hi[i] * e_hi[i];
    }
#pragma omp simd reduction(+ : intended, lost, lost_hi, fed, stale_v)
    for (size_t i = 0; i < n; i++) {
      const int wanted = u[i] != 0, gave = g[i] != 0;
      intended += wanted, lost += wanted & (e[i] == 0), lost_hi += wanted & (e_hi[i] == 0);
      fed += gave, stale_v += gave & (v_moved[i] == 0);
    }
    return {uu, ue, ee, ue_hi, ee_hi, intended, lost, lost_hi, fed, stale_v};
  }
};
