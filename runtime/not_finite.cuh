// Where a run that went wrong went wrong first.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "mcf/bf16.h"
#include "runtime/comm.h"
#include "runtime/parameter.h"

// The first tensor, in the order of the table, in which this rank's part of a flat buffer has an element that is not
// finite; "" where there is none. The same for all ranks. Collective.
template <class floatX>
std::string first_not_finite(const floatX* values, const std::vector<Parameter>& parameters, const Part& part,
                             Device& device, Comm& comm) {
  size_t first = parameters.size();
  std::vector<floatX> piece;
  for_each_piece(parameters, part, [&](const Parameter& p, size_t, size_t n, size_t begin) {
    const size_t index = static_cast<size_t>(&p - parameters.data());
    if (index >= first) return;
    piece.resize(n);
    device.download(piece.data(), values + begin, n);
    if (!std::all_of(piece.begin(), piece.end(), [](floatX x) { return std::isfinite(to_float(x)); })) first = index;
  });
  for (const size_t other : comm.gather(first)) first = std::min(first, other);
  return first < parameters.size() ? parameters[first].name : "";
}
