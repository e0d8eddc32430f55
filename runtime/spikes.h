// How far a loss or a gradient norm stands out from those before it.
#pragma once
#include <cmath>
#include <cstddef>
#include <vector>

class SpikeWindow {
 public:
  static constexpr size_t size = 128;

  SpikeWindow() = default;
  explicit SpikeWindow(std::vector<double> values) : values_(std::move(values)) {}

  // Standard deviations that x lies above the mean of the window. NaN where that says nothing: x is not finite, the
  // window is not full yet, or all in it is equal. The sums are made anew each time, so that no value stays in them.
  double z(double x) const {
    if (!std::isfinite(x) || values_.size() < size) return std::nan("");
    double mean = 0, variance = 0;
    for (const double v : values_) mean += v / size;
    for (const double v : values_) variance += (v - mean) * (v - mean) / size;
    return variance > 0 ? (x - mean) / std::sqrt(variance) : std::nan("");
  }
  // The window moves on: a spike is in it too, so that a new level is soon no spike. What is not finite is left out.
  void add(double x) {
    if (!std::isfinite(x)) return;
    if (values_.size() == size) values_.erase(values_.begin());
    values_.push_back(x);
  }
  const std::vector<double>& values() const { return values_; }  // the oldest first; at most `size`

 private:
  std::vector<double> values_;
};
