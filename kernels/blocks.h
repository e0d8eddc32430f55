// Fixed blocks of elements: what AdamW, the gradient norm and the quality sums work on.
//
// Parameters lie in one flat buffer, tensor after tensor. A block never crosses a tensor, and partial sums are added in
// block order, so results do not depend on how many threads or ranks share the work.
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

// Part of the flat buffer: whole blocks, and the elements that they span.
struct Part {
  size_t first_block, last_block;  // [first, last), as far as there are blocks
  size_t begin, end;               // elements; alignment gaps belong to the part before them
  Part(size_t first_block, size_t last_block, size_t begin, size_t end)
      : first_block(first_block), last_block(last_block), begin(begin), end(end) {}
  Part(size_t elements) : Part(0, SIZE_MAX, 0, elements) {}  // all of a flat buffer
  size_t n() const { return end - begin; }
};

// The flat buffer cut between blocks into one contiguous part a rank. Rank r owns blocks[r] to blocks[r + 1], which are
// elements[r] to elements[r + 1].
struct Cut {
  std::vector<size_t> blocks, elements;  // (ranks + 1)
  Part part(int rank) const {
    const size_t r = static_cast<size_t>(rank);
    return {blocks[r], blocks[r + 1], elements[r], elements[r + 1]};
  }
};

// As even as blocks allow: no part has a block's elements more than its share. With fewer blocks than ranks some own
// nothing. elements: of the flat buffer, the gap after the last tensor included.
inline Cut cut_blocks(const std::vector<Block>& blocks, size_t elements, int ranks) {
  Cut cut;
  size_t b = 0;
  for (int r = 0; r <= ranks; r++) {
    const size_t target = elements / static_cast<size_t>(ranks) * static_cast<size_t>(r);
    while (b < blocks.size() && (r == ranks || blocks[b].begin < target)) b++;
    cut.blocks.push_back(b);
    cut.elements.push_back(b < blocks.size() ? blocks[b].begin : elements);
  }
  cut.elements[0] = 0;
  return cut;
}
