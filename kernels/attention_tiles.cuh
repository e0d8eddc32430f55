// What the attention kernels on tensor cores share: tiles of Q, K, V, dO in shared memory, and fragments in registers.
//
// A tile is (rows, d) bf16, filled by cp.async straight from packed qkv (B,T,3,NH,d), 16 bytes ("a chunk") at a time.
// ldmatrix reads eight rows of one chunk column in a cycle if they lie in eight different groups of four banks, so
// chunks are permuted within a row. Nothing is padded, whatever d is: d = 80 and 96 cost no more than their bytes.
//
// One pattern of lane addresses serves every operand: lane l points at row l%16 and chunk l/16 of a 16x16 block.
// ldmatrix_x4 of it gives (rows 0-7, chunk 0), (rows 8-15, chunk 0), (rows 0-7, chunk 1), (rows 8-15, chunk 1), which
// is
//   plain: A (16 rows x 16 of d), registers 0 1 2 3; or B of two products with 8 rows each, registers 0 2 and 1 3;
//   trans: B (16 rows as the inner dimension) of two products with 8 columns of d each, registers 0 1 and 2 3.
#pragma once
#include <initializer_list>
#include <type_traits>

#include "kernels/portable.cuh"
#include "mcf/bf16.h"

constexpr int attention_warps = 4, attention_threads = attention_warps * warp_size;

// Tile sizes of a kernel. A warp owns 16 * row_tiles rows: queries, in dK/dV keys. tile: rows of a tile of the other
// side; step: its rows taken at a time (forward: all). resident: the warp's own operands stay in registers, and their
// place in shared memory is used again; otherwise they are read again each time. blocks: on an SM, which bounds the
// registers of a thread to 65536 / (128 * blocks). Shared memory leaves room for them too, but where an SM has only
// 100 KB: there d = 128 gets one block in forward and in dK/dV, and d = 64 two of three in dK/dV.
struct AttentionTiles {
  int row_tiles, tile, step;
  bool resident;
  int blocks;
};
struct AttentionWidth {
  int d;
  AttentionTiles forward, dQ, dKV;
};
// Every head width that has kernels on tensor cores. Chosen on paper, none measured yet. Each warp reads whole tiles of
// the other side, and with 16 rows a warp these reads, at 128 bytes a cycle, take longer than the products they feed on
// sm_80 and sm_90: forward d = 64, a warp and 64 keys, 160 cycles of reads and fills against 96 to 128 of products. Two
// row tiles halve that, so they are taken where they fit in the registers without a spill.
// Budgets: registers of a thread (nvcc 13.0, the most of sm_80, 90, 100 and 120) / KiB of shared memory of a block:
//    d   forward      dQ           dK, dV
//   32   124 / 12     123 / 16     146 / 17
//   64   246 / 24     236 / 32     168 / 33
//   80   198 / 35     196 / 40     234 / 41
//   96   220 / 42     207 / 48     254 / 49
//  128   254 / 56     243 / 32     244 / 64.5
// clang-format off
inline constexpr AttentionWidth attention_widths[] = {
    // d   forward                   dQ                        dK, dV
    { 32, {1, 64, 64, true,  4},    {1, 64, 32, true, 4},     {1, 64, 16, true,  3}},
    { 64, {2, 64, 64, true,  2},    {2, 64, 16, true, 2},     {1, 64, 16, true,  3}},
    { 80, {2, 32, 32, false, 2},    {1, 64, 32, true, 2},     {1, 64, 16, true,  2}},
    { 96, {2, 32, 32, false, 2},    {1, 64, 32, true, 2},     {1, 64, 16, true,  2}},
    {128, {2, 32, 32, false, 2},    {1, 32, 32, true, 2},     {1, 32, 16, false, 2}},
};
// clang-format on
constexpr AttentionWidth attention_width(int d) {
  for (const AttentionWidth& width : attention_widths)
    if (width.d == d) return width;
  return {};
}

// Calls run(std::integral_constant<int, d>) if the table has d, and says whether it did.
template <int row = 0, class Run>
bool attention_with_tiles(int d, const Run& run) {
  if constexpr (row < sizeof attention_widths / sizeof attention_widths[0]) {
    constexpr int width = attention_widths[row].d;
    if (d != width) return attention_with_tiles<row + 1>(d, run);
    run(std::integral_constant<int, width>());
    return true;
  }
  return false;
}

inline void check_attention_pointers(std::initializer_list<const void*> pointers) {
  for (const void* p : pointers)
    CHECK(reinterpret_cast<uintptr_t>(p) % 16 == 0, "attention: %p is not 16-byte aligned, as cp.async needs it", p);
}

// Byte offsets in a tile of rows of d. Checked on the CPU: a permutation, and no bank conflict, for each d.
template <int d>
struct AttentionTile {
  static_assert(d % 16 == 0 && d <= 256);
  static constexpr int row_bytes = d * 2, chunks = d / 8;
  // Chunks permuted among themselves: the largest power of two that divides the chunks of a row, at most the eight bank
  // groups. Successive rows start `chunks` bank groups further on, so eight/group of them differ as they are, and the
  // next eight/group rows are told apart by XOR with the next number below `group`.
  static constexpr int group = chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : 2;

  __host__ __device__ static constexpr int swizzle(int row) { return row / (8 / group) % group; }
  __host__ __device__ static constexpr int offset(int row, int chunk) {
    return row * row_bytes + (chunk ^ swizzle(row)) * 16;
  }
  // From the address of chunk 0 or 1 of a row to that of chunk 2 * pair or 2 * pair + 1: XOR below `group`, where no
  // carry can arise since rows and tiles start at multiples of it, and an addition that ldmatrix takes as an immediate.
  // Along rows: add row_bytes times a multiple of 8 rows.
  __host__ __device__ static constexpr shared_address along(shared_address first, int pair) {
    return (first ^ static_cast<shared_address>(2 * pair % group * 16)) +
           static_cast<shared_address>(2 * pair / group * group * 16);
  }
};

// Starts the copies of `rows` rows of a matrix, from its row `first` on, by all threads of the block. Rows at T and
// beyond become zero. stride: elements from a row to the next.
template <int d, int rows>
__device__ inline void fetch_tile(shared_address tile, const bf16* matrix, int stride, int first, int T) {
  using Tile = AttentionTile<d>;
  constexpr int chunks = rows * Tile::chunks, thread_chunks = (chunks + attention_threads - 1) / attention_threads;
  const bf16* source = matrix + static_cast<int64_t>(first) * stride;
  const int thread = static_cast<int>(threadIdx.x), inside = T - first;
  // Two loops: only a sequence's last tile needs to know where the sequence ends.
  if (inside >= rows) {
    UNROLL
    for (int n = 0; n < thread_chunks; n++) {
      const int i = n * attention_threads + thread, row = i / Tile::chunks, chunk = i % Tile::chunks;
      if (chunks % attention_threads == 0 || i < chunks)
        cp_async_16(tile + Tile::offset(row, chunk), source + row * stride + chunk * 8);
    }
  } else {
    for (int i = thread; i < chunks; i += attention_threads) {
      const int row = i / Tile::chunks, chunk = i % Tile::chunks;
      const bool real = row < inside;
      cp_async_16(tile + Tile::offset(row, chunk), source + (real ? row * stride + chunk * 8 : 0), real ? 16 : 0);
    }
  }
}

// The byte offset at which this lane points for the 16x16 block at the tile's start.
template <int d>
__device__ inline shared_address lane_offset() {
  const int lane = static_cast<int>(threadIdx.x % warp_size);
  return static_cast<shared_address>(AttentionTile<d>::offset(lane % 16, lane / 16));
}

// A operand, 16 rows x d, all of it in registers: rows r0.. of a tile at `tile`.
template <int d>
__device__ inline void load_rows(uint32_t (&fragment)[d / 16][4], shared_address tile, int r0) {
  const shared_address first = tile + static_cast<shared_address>(r0 * AttentionTile<d>::row_bytes) + lane_offset<d>();
  UNROLL
  for (int k = 0; k < d / 16; k++) ldmatrix_x4(fragment[k], AttentionTile<d>::along(first, k));
}

// Two neighbouring 16x8 results have the layout of one 16x16 A operand: P and dS never pass through shared memory.
__device__ inline void accumulators_to_operand(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack_bf16(left[0], left[1]);
  a[1] = pack_bf16(left[2], left[3]);
  a[2] = pack_bf16(right[0], right[1]);
  a[3] = pack_bf16(right[2], right[3]);
}

// acc (16 row_tiles, d) += p (16 row_tiles, columns), rounded to bf16, times rows of a tile.
template <int d, int row_tiles, int columns>
__device__ inline void add_product(float (&acc)[row_tiles][d / 8][4], const float (&p)[row_tiles][columns / 8][4],
                                   shared_address tile) {
  using Tile = AttentionTile<d>;
  UNROLL
  for (int n = 0; n < columns / 16; n++) {
    uint32_t a[row_tiles][4];
    UNROLL
    for (int r = 0; r < row_tiles; r++) accumulators_to_operand(a[r], p[r][2 * n], p[r][2 * n + 1]);
    UNROLL
    for (int c = 0; c < d / 16; c++) {
      uint32_t fragment[4];
      ldmatrix_x4_trans(fragment, Tile::along(tile, c) + n * 16 * Tile::row_bytes);
      UNROLL
      for (int r = 0; r < row_tiles; r++) {
        mma_m16n8k16(acc[r][2 * c], a[r], fragment[0], fragment[1]);
        mma_m16n8k16(acc[r][2 * c + 1], a[r], fragment[2], fragment[3]);
      }
    }
  }
}

// to (T, stride) rows first.. = acc * scale of the low and high eight rows, 16 rows x d, by one warp. A lane holds
// pairs of numbers; they go through 16 rows of shared memory that this warp alone uses, to be stored as whole chunks.
template <int d>
__device__ inline void store_rows(bf16* to, int64_t stride, int first, int T, const float (&acc)[d / 8][4], float low,
                                  float high, unsigned char* staging) {
  using Tile = AttentionTile<d>;
  const int lane = static_cast<int>(threadIdx.x % warp_size), g = lane / 4, t = lane % 4;
  __syncwarp();  // what this warp staged before has been read
  UNROLL
  for (int c = 0; c < Tile::chunks; c++) {
    *reinterpret_cast<uint32_t*>(staging + Tile::offset(g, c) + 4 * t) = pack_bf16(acc[c][0] * low, acc[c][1] * low);
    *reinterpret_cast<uint32_t*>(staging + Tile::offset(g + 8, c) + 4 * t) =
        pack_bf16(acc[c][2] * high, acc[c][3] * high);
  }
  __syncwarp();
  UNROLL
  for (int n = 0; n < 16 * Tile::chunks / warp_size; n++) {
    const int i = n * warp_size + lane, row = i / Tile::chunks, chunk = i % Tile::chunks;
    const Vec16<uint32_t> words = load16(reinterpret_cast<const uint32_t*>(staging + Tile::offset(row, chunk)));
    Vec16<bf16> x;
    memcpy(&x, &words, sizeof x);
    if (first + row < T) store16(to + (first + row) * stride + chunk * 8, x);
  }
}
