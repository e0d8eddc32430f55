// The positions of a batch by token, made on the CPU, so that the embedding's gradient needs no atomics on a GPU.
//
// One flat array of int, whose size depends on the number of positions only: one copy to the device, and the same grid
// for every batch. Positions are sorted by token, within one as they come, and cut into runs of at most run_length of
// the same token. Runs of a token that has several each own a slot of fp32 scratch.
//
//   runs, long_tokens, -, -       4
//   positions                     BT
//   Run {token, begin, n, slot}   4 each, BT at most
//   Long {token, slot, runs, -}   4 each, max_long_tokens(BT) at most
#pragma once
#include <algorithm>
#include <vector>

#include "kernels/portable.cuh"

class TokenBuckets {
 public:
  struct Run {
    int token, begin, n, slot;
  };  // slot < 0: all of the token
  struct Long {
    int token, slot, runs, unused;
  };  // a token's runs, in consecutive slots
  static constexpr int run_length = 64;

  __host__ __device__ TokenBuckets(const int* data, int BT) : data_(data), BT_(BT) {}
  __host__ __device__ int runs() const { return data_[0]; }
  __host__ __device__ int long_tokens() const { return data_[1]; }
  __host__ __device__ const int* positions() const { return data_ + 4; }
  __host__ __device__ Run run(int i) const {
    const int* r = positions() + BT_ + 4 * static_cast<size_t>(i);
    return {r[0], r[1], r[2], r[3]};
  }
  __host__ __device__ Long long_token(int i) const {
    const int* l = positions() + 5 * static_cast<size_t>(BT_) + 4 * static_cast<size_t>(i);
    return {l[0], l[1], l[2], l[3]};
  }

  // A long token has run_length + 1 positions at least, and n of them make at most n/run_length + 1 runs.
  static int max_long_tokens(int BT) { return BT / (run_length + 1); }
  static int max_slots(int BT) { return BT / run_length + max_long_tokens(BT); }
  static size_t ints(int BT) { return 4 + 5 * static_cast<size_t>(BT) + 4 * static_cast<size_t>(max_long_tokens(BT)); }

 private:
  const int* data_;
  int BT_;
};

// Fills out (TokenBuckets::ints(BT)) for tokens (BT), each in [0, V). A counting sort: O(BT + V).
inline void bucket_tokens(int* out, const int* tokens, int BT, int V) {
  std::vector<int> end(static_cast<size_t>(V) + 1, 0);  // end[token + 1] counts, then end[token] is where it starts
  for (int i = 0; i < BT; i++) end[static_cast<size_t>(tokens[i]) + 1]++;
  for (size_t v = 1; v < end.size(); v++) end[v] += end[v - 1];
  int* positions = out + 4;
  for (int i = 0; i < BT; i++) positions[end[static_cast<size_t>(tokens[i])]++] = i;  // now where it ends

  int runs = 0, long_tokens = 0, slots = 0, *run = positions + BT, *long_token = run + 4 * static_cast<size_t>(BT);
  for (int begin = 0; begin < BT;) {
    const int token = tokens[positions[begin]], n = end[static_cast<size_t>(token)] - begin;
    const int pieces = (n + TokenBuckets::run_length - 1) / TokenBuckets::run_length;
    if (pieces > 1) {
      const int l[] = {token, slots, pieces, 0};
      std::copy_n(l, 4, long_token + 4 * static_cast<size_t>(long_tokens++));
    }
    for (int i = 0; i < pieces; i++) {
      const int first = i * TokenBuckets::run_length;
      const int r[] = {token, begin + first, std::min(n - first, TokenBuckets::run_length), pieces > 1 ? slots++ : -1};
      std::copy_n(r, 4, run + 4 * static_cast<size_t>(runs++));
    }
    begin += n;
  }
  out[0] = runs, out[1] = long_tokens, out[2] = out[3] = 0;
}
