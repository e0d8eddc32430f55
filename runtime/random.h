// Counter-based random numbers: a pure function of its keys, so that no generator state exists to save, to share
// or to advance in a different order on another rank.
#pragma once
#include <cmath>
#include <cstdint>

#include "kernels/portable.cuh"  // __host__, __device__

// SplitMix64's finaliser (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014): a bijection of
// 64 bits in which each input bit flips each output bit with probability about one half.
__host__ __device__ inline uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// 64 random bits for a key of up to four words; the order of the words matters.
inline uint64_t random_bits(uint64_t a, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0) {
  return mix64(mix64(mix64(mix64(a) + b) + c) + d);
}

// Uniform in [0, 1), 53 bits.
inline double random_uniform(uint64_t a, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0) {
  return static_cast<double>(random_bits(a, b, c, d) >> 11) * 0x1p-53;
}

// A bijection of [0, n) chosen by key: a 4-round Feistel network on the next even number of bits, walked until it lands
// below n (at most 4 steps on average). So a shuffled order needs no memory, and any place in it can be found directly.
inline uint64_t random_permutation(uint64_t i, uint64_t n, uint64_t key) {
  int half = 1;
  while (half < 32 && (uint64_t{1} << (2 * half)) < n) half++;
  const uint64_t mask = (uint64_t{1} << half) - 1;
  do {
    uint64_t left = i >> half, right = i & mask;
    for (uint64_t round = 0; round < 4; round++) {
      const uint64_t swap = left ^ (random_bits(key, round, right) & mask);
      left = right;
      right = swap;
    }
    i = (left << half) | right;
  } while (i >= n);
  return i;
}
