// The tokens of one micro-batch.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

struct Batch {
  int B, T;
  std::vector<int> tokens, targets;  // (B,T)
  Batch(int B, int T)
      : B(B), T(T), tokens(static_cast<size_t>(B) * T), targets(tokens.size()), row_(static_cast<size_t>(T) + 1) {}

  // Fills row b by read(out), which gives T + 1 ids.
  template <class Read>
  void fill_row(int b, Read&& read) {
    read(row_.data());
    std::copy(row_.begin(), row_.end() - 1, tokens.begin() + static_cast<int64_t>(b) * T);
    std::copy(row_.begin() + 1, row_.end(), targets.begin() + static_cast<int64_t>(b) * T);
  }

 private:
  std::vector<int32_t> row_;
};
