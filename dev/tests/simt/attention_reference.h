// Attention in fp64, forward and backward, straight from the formulas; with roundings to bf16 where a kernel has them,
// to learn what error those alone make.
#pragma once
#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "mcf/bf16.h"

struct AttentionShape {
  int B, T, NH, d;
  size_t C() const { return static_cast<size_t>(NH) * d; }
  size_t rows() const { return static_cast<size_t>(B) * T; }
  size_t stats() const { return rows() * NH; }
  std::string name() const {
    return "B=" + std::to_string(B) + " T=" + std::to_string(T) + " NH=" + std::to_string(NH) +
           " d=" + std::to_string(d);
  }
};

struct AttentionResult {
  std::vector<double> out, dq, dk, dv;  // (B,T,NH,d)
  std::vector<double> lse;              // (B,NH,T)
  double magnitude[4] = {};             // out, dQ, dK, dV: the largest sum of magnitudes of an element's terms
  double max_score = 0;
  const std::vector<double>& tensor(int which) const {
    return which == 0 ? out : which == 1 ? dq : which == 2 ? dk : dv;
  }
};

// results: to bf16. scores: P and dS to bf16 where they enter a product.
struct Rounding {
  bool results = false, scores = false;
};

inline std::vector<float> normal_numbers(size_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> x(n);
  for (float& v : x) v = distribution(generator);
  return x;
}

// Packed (B,T,3,NH,d) gradients taken apart.
inline AttentionResult split(const AttentionShape& s, const std::vector<double>& out, const std::vector<double>& dqkv,
                             const std::vector<double>& lse) {
  AttentionResult r;
  r.out = out;
  r.lse = lse;
  std::vector<double>* parts[] = {&r.dq, &r.dk, &r.dv};
  for (size_t i = 0; i < dqkv.size(); i++) parts[i / s.C() % 3]->push_back(dqkv[i]);
  return r;
}

inline AttentionResult attention_reference(const AttentionShape& s, const std::vector<double>& qkv,
                                           const std::vector<double>& dout, Rounding rounding) {
  const auto round_if = [](bool yes, double x) { return yes ? static_cast<double>(rn(static_cast<float>(x))) : x; };
  const size_t T = static_cast<size_t>(s.T), d = static_cast<size_t>(s.d), C = s.C(), NH = static_cast<size_t>(s.NH);
  const double scale = 1 / std::sqrt(static_cast<double>(d));
  AttentionResult r;
  for (auto* x : {&r.out, &r.dq, &r.dk, &r.dv}) x->assign(s.rows() * C, 0.0);
  r.lse.assign(s.stats(), 0.0);
  std::vector<double> magnitude_k, magnitude_v, score(T), p(T);

  for (size_t bh = 0; bh < static_cast<size_t>(s.B) * NH; bh++) {
    const size_t sequence = bh / NH * T, head = bh % NH * d;
    const auto at = [&](size_t t) { return (sequence + t) * C + head; };  // in (B,T,NH,d)
    const auto in = [&](int part, size_t t) { return &qkv[(sequence + t) * 3 * C + part * C + head]; };
    magnitude_k.assign(T * d, 0.0);
    magnitude_v.assign(T * d, 0.0);
    for (size_t q = 0; q < T; q++) {
      double max = -INFINITY, sum = 0;
      for (size_t k = 0; k <= q; k++) {
        score[k] = 0;
        for (size_t i = 0; i < d; i++) score[k] += in(0, q)[i] * in(1, k)[i] * scale;
        max = std::max(max, score[k]);
        r.max_score = std::max(r.max_score, std::fabs(score[k]));
      }
      for (size_t k = 0; k <= q; k++) sum += std::exp(score[k] - max);
      r.lse[bh * T + q] = max + std::log(sum);
      double D = 0;
      for (size_t i = 0; i < d; i++) {
        double o = 0, magnitude = 0;
        for (size_t k = 0; k <= q; k++) {
          const double term = round_if(rounding.scores, std::exp(score[k] - max)) * in(2, k)[i];
          o += term;
          magnitude += std::fabs(term);
        }
        r.out[at(q) + i] = round_if(rounding.results, o / sum);
        r.magnitude[0] = std::max(r.magnitude[0], magnitude / sum);
        D += r.out[at(q) + i] * dout[at(q) + i];
      }
      std::vector<double> magnitude_q(d, 0.0);
      for (size_t k = 0; k <= q; k++) {
        double dp = 0, dp_magnitude = std::fabs(D);
        for (size_t i = 0; i < d; i++) {
          dp += dout[at(q) + i] * in(2, k)[i];
          dp_magnitude += std::fabs(dout[at(q) + i] * in(2, k)[i]);
        }
        const double exact_p = std::exp(score[k] - r.lse[bh * T + q]);
        const double P = round_if(rounding.scores, exact_p), dS = round_if(rounding.scores, exact_p * (dp - D));
        const double dS_magnitude = exact_p * dp_magnitude;
        for (size_t i = 0; i < d; i++) {
          r.dq[at(q) + i] += dS * in(1, k)[i] * scale;
          r.dk[at(k) + i] += dS * in(0, q)[i] * scale;
          r.dv[at(k) + i] += P * dout[at(q) + i];
          magnitude_q[i] += std::fabs(dS_magnitude * in(1, k)[i] * scale);
          magnitude_k[k * d + i] += std::fabs(dS_magnitude * in(0, q)[i] * scale);
          magnitude_v[k * d + i] += std::fabs(P * dout[at(q) + i]);
        }
      }
      r.magnitude[1] = std::max(r.magnitude[1], *std::max_element(magnitude_q.begin(), magnitude_q.end()));
    }
    r.magnitude[2] = std::max(r.magnitude[2], *std::max_element(magnitude_k.begin(), magnitude_k.end()));
    r.magnitude[3] = std::max(r.magnitude[3], *std::max_element(magnitude_v.begin(), magnitude_v.end()));
  }
  for (auto* x : {&r.dq, &r.dk, &r.dv})
    for (double& v : *x) v = round_if(rounding.results, v);
  return r;
}
