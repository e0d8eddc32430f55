// The middle of a few measurements: what a shared machine's neighbours disturb least.
#pragma once
#include <algorithm>
#include <vector>

inline double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return (x[(x.size() - 1) / 2] + x[x.size() / 2]) / 2;
}
