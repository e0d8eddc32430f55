// Fixed blocks of elements: what AdamW, the gradient norm and the quality sums work on.
//
// Parameters lie in one flat buffer, tensor after tensor. A block never crosses a tensor, and partial sums are added in
// block order, so results do not depend on how many threads (later: ranks) share the work.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

inline constexpr size_t block_elements = 8192;
inline constexpr size_t tensor_alignment = 64;  // elements: a tensor starts on a cache line in every state

struct Block {
  size_t begin;  // first element in the flat buffer
  uint32_t n;    // elements, <= block_elements
  bool decay;    // weight decay applies
};

// Appends the blocks of a tensor of n elements at `begin`.
inline void append_blocks(std::vector<Block>& blocks, size_t begin, size_t n, bool decay) {
  for (size_t i = 0; i < n; i += block_elements)
    blocks.push_back({begin + i, static_cast<uint32_t>(std::min(block_elements, n - i)), decay});
}
