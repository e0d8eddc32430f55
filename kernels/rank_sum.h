// The sum of the ranks' gradients on the CPU: in fp32, rank after rank, rounded once.
//
// In that order whatever carries the pieces, so that a run repeats bit for bit: MPI's own reductions add in an order
// that depends on the message's size from 3 ranks on, and know no bf16.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

#include "mcf/bf16.h"

// out[i] = the sum over r of addends[r][i]. out may be one of the addends.
template <class floatX>
void sum_in_rank_order(floatX* out, const std::vector<const floatX*>& addends, size_t n) {
  constexpr size_t tile = 2048;  // its sums stay in the L1 cache
#pragma omp parallel for schedule(static)
  for (size_t begin = 0; begin < n; begin += tile) {
    const size_t count = std::min(tile, n - begin);
    float sum[tile];
    for (size_t i = 0; i < count; i++) sum[i] = to_float(addends[0][begin + i]);
    for (size_t r = 1; r < addends.size(); r++) {
      const floatX* a = addends[r] + begin;
#pragma omp simd
      for (size_t i = 0; i < count; i++) sum[i] += to_float(a[i]);
    }
#pragma omp simd
    for (size_t i = 0; i < count; i++) store(out[begin + i], sum[i]);
  }
}
