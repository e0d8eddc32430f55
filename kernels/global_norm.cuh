// The norm of the whole gradient.
#pragma once
#include <cmath>
#include <vector>

#include "kernels/blocks.h"
#include "kernels/device.h"
#include "mcf/bf16.h"

// sqrt of the sum of squares over all blocks of grads. In double, since bf16 gradients above 1.8e19 overflow when
// squared in fp32; partial sums a block, added in block order. Padded vocabulary rows count nothing, for they stay 0.
template <class floatX>
double global_norm(const floatX* grads, const std::vector<Block>& blocks, Device& device) {
  Scope scope("global_norm", device);
  std::vector<double> partial(blocks.size());
#pragma omp parallel for schedule(static)
  for (size_t b = 0; b < blocks.size(); b++) {
    const floatX* g = grads + blocks[b].begin;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < blocks[b].n; i++) sum += static_cast<double>(to_float(g[i])) * to_float(g[i]);
    partial[b] = sum;
  }
  double sum = 0;
  for (const double p : partial) sum += p;
  return std::sqrt(sum);
}
