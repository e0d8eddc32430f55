// A tensor of the model, as train_gpt.cu's parameter table lists it.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/blocks.h"

enum class Init { normal, residual, ones, zeros };  // N(0, 0.02); N(0, 0.02 / sqrt(2L)); 1; 0

struct Parameter {
  std::string name;       // Hugging Face's for GPT-2
  int64_t rows, columns;  // (rows, columns) row-major; a vector has one column
  int64_t used_rows;      // the rows beyond are padding and stay 0
  Init init;
  bool decay;       // weight decay applies: matrices, not biases and LayerNorm parameters
  bool transposed;  // Hugging Face stores it as (columns, rows)
  size_t begin;     // first element in the flat buffer
  size_t n() const { return static_cast<size_t>(rows * columns); }
  size_t used() const { return static_cast<size_t>(used_rows * columns); }  // elements, without padding
};

// Calls f(parameter, first, n, begin) for the elements of each parameter that lie in the part, without padding: the
// parameter's own from `first` on, in the flat buffer from `begin` on.
template <class F>
void for_each_piece(const std::vector<Parameter>& parameters, const Part& part, F&& f) {
  for (const Parameter& p : parameters) {
    const size_t begin = std::max(p.begin, part.begin), end = std::min(p.begin + p.used(), part.end);
    if (begin < end) f(p, begin - p.begin, end - begin, begin);
  }
}
