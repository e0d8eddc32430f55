// The shadow: AdamW in double on a sample of the weights, fed with the gradients of the run.
//
// What it would have made of the same gradients is what an optimizer's weight, m and v are compared with. So one sees
// which of them went wrong, where effective descent quality judges the last rounding only: an update made well from a
// wrong v looks perfect there.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "mcf/adamw.cuh"

// Sums over sampled elements: squared distances from the shadow, and what they are measured by.
struct DriftSums {
  double weight = 0, travelled = 0;  // |w - shadow|^2, |shadow - initial weight|^2
  double m = 0, m_size = 0;          // |m - shadow|^2, |shadow|^2
  double v = 0, v_size = 0;
  void operator+=(const DriftSums& o) {
    weight += o.weight, travelled += o.travelled, m += o.m, m_size += o.m_size, v += o.v, v_size += o.v_size;
  }
};
// Relative: 0 = as the shadow, 1 = as far off as the shadow is large (the weight: as far as it has come). NaN where
// there is nothing to compare with.
inline double drift(double square, double of) { return of > 0 ? std::sqrt(square / of) : std::nan(""); }

// What a shadow holds, by name, in the order of its places.
using ShadowArrays = std::vector<std::pair<std::string, std::vector<double>>>;

template <class floatX>
class Shadow {
 public:
  // Of the elements of the part about one in `one_in`, chosen by a hash of the place in the flat buffer; 0: none.
  // params: the initial weights, the whole buffer.
  Shadow(int64_t one_in, const floatX* params, const BlockList& blocks, const Part& part, Device& device)
      : sums_(blocks.host.size()) {
    if (one_in == 0) return;
    const size_t last = std::min(part.last_block, blocks.host.size());
    const uint64_t run = static_cast<uint64_t>(one_in);
    // In each run of so many elements of a block, the one at a random place.
    for (size_t b = 0; b < blocks.host.size(); b++)
      for (uint64_t i = 0; i < blocks.host[b].n; i += run) {
        const uint64_t place = blocks.host[b].begin + i, at = random_bits(~uint64_t{2}, place) % run;
        if (i + at >= blocks.host[b].n) continue;
        before_ += b < part.first_block, all_++;
        if (b >= part.first_block && b < last)
          places_.push_back(place + at), block_.push_back(b), decay_.push_back(blocks.host[b].decay);
      }
    const size_t n = places_.size();
    at_ = Buffer<size_t>(device, Memory::workspace, n);
    device.upload(at_.data(), places_.data(), n);
    start_ = fetch(params, device), weight_ = start_;
    m_.resize(n), v_.resize(n);
  }

  size_t size() const { return places_.size(); }
  size_t all() const { return all_; }  // of all parts

  ShadowArrays arrays() const { return {{"start", start_}, {"weight", weight_}, {"m", m_}, {"v", v_}}; }
  // all: arrays() of all parts, one after the other. false where they are not of this sample.
  bool restore(const ShadowArrays& all) {
    size_t i = 0;
    for (auto* mine : {&start_, &weight_, &m_, &v_}) {
      const std::vector<double>& values = all[i++].second;
      if (values.size() != all_) return false;
      mine->assign(values.begin() + static_cast<int64_t>(before_),
                   values.begin() + static_cast<int64_t>(before_ + size()));
    }
    return true;
  }

  // One step with the gradients of the whole buffer, each times clip. t: updates done, this one included.
  void update(const floatX* grads, double lr, double beta1, double beta2, double eps, double weight_decay, double clip,
              int64_t t, Device& device) {
    if (size() == 0) return;
    const std::vector<double> g = fetch(grads, device);
    const double a1 = lr / (1 - std::pow(beta1, static_cast<double>(t)));
    const double r2 = 1 / std::sqrt(1 - std::pow(beta2, static_cast<double>(t)));
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < g.size(); i++) {
      const double scaled = clip * g[i];
      m_[i] = beta1 * m_[i] + (1 - beta1) * scaled;
      v_[i] = beta2 * v_[i] + (1 - beta2) * scaled * scaled;
      weight_[i] -= a1 * m_[i] / (std::sqrt(v_[i]) * r2 + eps) + (decay_[i] ? lr * weight_decay * weight_[i] : 0);
    }
  }

  // How far an optimizer that got the same gradients is from it, a block of the flat buffer each (0 outside the part).
  const std::vector<DriftSums>& compare(const Optimizer<floatX>& optimizer, const floatX* params, Device& device) {
    sums_.assign(sums_.size(), {});
    if (size() == 0) return sums_;
    const auto now = optimizer.values(params, at_.data(), size(), device);
    const auto square = [](double x) { return x * x; };
    for (size_t i = 0; i < size(); i++)
      sums_[block_[i]] += {square(now.weight[i] - weight_[i]), square(weight_[i] - start_[i]),
                           square(now.m[i] - m_[i]),           square(m_[i]),
                           square(now.v[i] - v_[i]),           square(v_[i])};
    return sums_;
  }

 private:
  std::vector<double> fetch(const floatX* from, Device& device) const {
    std::vector<floatX> stored(size());
    gather_to_host(stored.data(), from, 0, at_.data(), size(), device);
    std::vector<double> wide(size());
    std::transform(stored.begin(), stored.end(), wide.begin(), [](floatX x) { return to_float(x); });
    return wide;
  }

  size_t before_ = 0, all_ = 0;  // in the parts before this one, in all
  std::vector<size_t> places_, block_;
  std::vector<char> decay_;
  std::vector<double> start_, weight_, m_, v_;
  std::vector<DriftSums> sums_;
  Buffer<size_t> at_;
};
