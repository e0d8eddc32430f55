// The runtime's own state, shared by its .cpp files only.
//
// Those files are compiled without sanitizers. They must not call memcpy, memset and the like on memory that a kernel
// sees either: ThreadSanitizer intercepts these everywhere, and takes them for accesses of the fiber that runs.
#pragma once
#include <bit>
#include <vector>

#include "dev/tests/simt/fiber.h"
#include "kernels/portable.cuh"

namespace simt {

constexpr int max_threads = 1024, max_warps = max_threads / 32;

enum class State { fresh, ready, at_barrier, in_collective, done };

// cp.async copies of one thread that are issued and not made, oldest first, and where each committed group ends.
struct GroupEnd { size_t copies; };
struct CopyQueue {
  std::vector<AsyncCopy> copies;
  std::vector<GroupEnd> group_ends;
  size_t made = 0, groups_made = 0;
  void clear() { copies.clear(), group_ends.clear(), made = groups_made = 0; }
};

struct alignas(64) Thread {
  // What a switch needs, in one cache line.
  uint3 index;
  int number;
  short warp, lane;
  State state;
  Fiber* fiber;
  Collective* call;                  // its part in its warp's collective
  const char* what;                  // what it waits in, and where
  Site site;
  unsigned barriers, warp_barriers;  // passed so far; their parity picks the ThreadSanitizer object

  CopyQueue queue;
};

struct Warp {
  unsigned live, arrived, at_barrier;  // lanes
  Thread* lanes;
};

// One array in shared memory, as offsets from the arena's base.
struct Array { uint32_t begin, end; const void* key; const char* name; };

// Shared memory of one block at a time: arrays with guard bytes around each.
struct Arena {
  char* base = nullptr;
  uint32_t used = 0;
  std::vector<Array> arrays;
};

// Everything that must not create an order between blocks in ThreadSanitizer's eyes. There are two, used in turn, so
// that blocks k and k+1 are unordered and a race between them is seen. Other builds use the first only.
struct Lineage {
  Fiber* fibers[max_threads] = {};  // one for each thread: only under ThreadSanitizer
  Arena arena;
  // Objects that carry happens-before. Two of each, alternating, because a thread that is through a barrier may release
  // the next one before another has acquired this one, which would order what isn't ordered.
  char finished[2], barrier[2], warp_barrier[max_warps][2];
};

struct Engine {
  bool launching = false;
  Grid grid;
  void (*body)(void*);
  void* arguments;
  int count, warp_count;  // threads and warps of a block
  Thread threads[max_threads];
  Warp warps[max_warps];
  uint64_t ready[max_threads / 64];  // fresh and ready threads, one bit each
  int live, waiting;
  Site barrier_site;
  Thread* current = nullptr;
  Fiber host;
  Fiber* free_fibers = nullptr;
  Lineage lineages[2];
  Lineage* lineage;
  int generation;       // of this lineage, modulo 2
  char started;         // happens-before from the host to every thread
  uint64_t random;
  Counters counters;
};
extern Engine engine;

inline bool same(const Site& a, const Site& b) {
  if (std::bit_cast<const void*>(a) == std::bit_cast<const void*>(b)) return true;
  return a.line() == b.line() && a.column() == b.column() && strcmp(a.file_name(), b.file_name()) == 0;
}
inline uint64_t next_random() {
  engine.random = engine.random * 6364136223846793005u + 1442695040888963407u;
  return engine.random >> 33;
}
inline void set_ready(const Thread& t) { engine.ready[t.number / 64] |= uint64_t{1} << t.number % 64; }
inline void clear_ready(const Thread& t) { engine.ready[t.number / 64] &= ~(uint64_t{1} << t.number % 64); }

// Lets others run until `me` is ready again.
void wait(Thread& me, State state, const char* what, Site site);

// The results of a complete collective, written for each of the warp's lanes.
void perform(const Warp& warp);

// shared.cpp: the arena of the block that starts, and the check of its guard bytes at the end.
void open_arena(Arena& arena, size_t dynamic_bytes);
void check_arena(const Arena& arena);

// report.cpp: prints the message, the kernel, the block and the running thread, where each warp is, and aborts.
[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char* format, ...);
std::string place(const Site& site);
std::string lane_list(unsigned lanes);

}  // namespace simt
