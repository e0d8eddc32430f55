// Running CUDA kernels on the CPU: what tests and the emulated intrinsics see of the runtime.
//
// Every CUDA thread is a fiber with its own stack; one block runs at a time, and within it one thread at a time, until
// it waits at a barrier or a warp collective. Which thread runs next is the schedule's choice. A kernel without missing
// synchronisation gives the same bits under every schedule, and a missing one gives other bits under some.
//
// What is checked in every run, each ending in a report with both places and abort():
//   - lanes of a warp that meet in different collectives, or whose mask is not exactly the lanes still alive;
//   - threads of a block that meet at different barriers; a thread at a block barrier, or gone, while its warp waits;
//   - shared memory: writes past an array (guard bytes, when the block ends), rows of ldmatrix or cp.async outside any
//     array or not 16-byte aligned; shared memory starts as signalling NaN in every block;
//   - launches that a GPU would refuse: sizes of grid and block, bytes of shared memory.
//
// As on hardware (Volta and newer) a thread that has returned no longer counts at barriers. Stricter than hardware:
// a barrier is one place in the source for all threads, and a collective's mask must name all lanes that are alive.
// What this can't show: blocks that wait for each other (they would hang), timing, weak memory order between warps.
#pragma once
#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>
#include <tuple>

#include "kernels/vector_types.h"

struct LaunchSite;

namespace simt {

using Site = std::source_location;

// forward, reverse: threads in rising or falling order, each until it waits, round and round; blocks in the same order.
// random: any thread that can run, from `seed`; blocks shuffled. ahead: the thread that completes a barrier runs on,
// then always the first that can run: low warps run as far ahead of high ones as barriers let them.
enum class Schedule { forward, reverse, random, ahead };

// When cp.async copies: the two legal extremes. at_wait also overwrites the destination with poison when the copy is
// issued, since its content is undefined from then on. random: either, copy by copy.
enum class Async { at_issue, at_wait, random };

// When work on a stream other than null runs: as it is put there; or once the host needs it (lazy); or then, and the
// other streams first run as far as events let them (racing). So a stream that does not wait for another one runs too
// late in lazy, or too early in racing.
enum class Streams { eager, lazy, racing };

struct Options {
  Schedule schedule = Schedule::forward;  // SIMT_SCHEDULE=forward|reverse|random|ahead
  uint64_t seed = 1;                      // SIMT_SEED
  Async async = Async::at_issue;          // SIMT_ASYNC=issue|wait|random
  uint32_t poison = 0x7fa07fa0;           // SIMT_POISON: a signalling NaN, read as fp32 or as two bf16
  Streams streams = Streams::eager;       // SIMT_STREAMS=eager|lazy|racing
};

// The options of the launches to come; they start from the environment.
Options& options();
std::string describe(const Options& o);

// Counts since the start or the last reset. An ldmatrix reads its tiles one by one, eight rows each; rows in the same
// sixteen bytes of a 128-byte line collide, and each collision costs one more cycle: `conflicts`.
struct Counters { uint64_t blocks, threads, switches, block_barriers, collectives, ldmatrix_tiles, conflicts; };
Counters& counters();

// True in a build with that sanitizer.
bool under_tsan();
bool under_asan();

// --- Called by kernels through intrinsics.h -------------------------------------------------------------------------

enum class Op { sync, shfl, shfl_xor, shfl_up, shfl_down, ballot, any, all, add, min, max, ldmatrix, mma };
enum class Number { i32, u32 };

// One lane's part in a warp collective. `in` and `out` lie on the lane's own stack and stay valid while it waits.
struct Collective {
  Op op;
  const char* name;  // as the kernel wrote it
  unsigned mask;
  const void* in;
  void* out;
  int bytes = 0;              // size of a shuffled value: 4 or 8
  int argument = 0;           // lane, lane mask or delta; tiles of an ldmatrix
  int width = 32;             // of a shuffle's segments
  Number number = Number::u32;  // of a reduction
  Site site = {};
};
struct MmaOperands { float c[4]; uint32_t a[4]; uint32_t b[2]; };
// What ldmatrix gives lane t: for tile m the addresses of its word (plain), or of its two halves (transposed).
struct TileAddresses { const void* at[8]; };
struct TileRow { uint32_t address; bool transposed; };

void block_barrier(Site site);
void warp_collective(Collective& call);

void* shared_static(const void* key, size_t bytes, const char* name);
void* shared_dynamic();
uint32_t shared_offset(const void* pointer, Site site);
// The pointer behind a 32-bit shared address; aborts unless [address, address + 16) is aligned and in one array.
void* shared_row(uint32_t address, const char* what, Site site);
void check_aligned(const void* pointer, size_t alignment, const char* what, Site site);

struct AsyncCopy { void* destination; const void* source; int bytes; };
// Whether the copy is to be made now; if not it is queued. Precondition of both: checked addresses.
bool async_issue(const AsyncCopy& copy);
void async_commit();
// The next copy that must be complete once at most `newest` groups are open. False: no more.
bool async_next(int newest, AsyncCopy& copy);
void check_copy_bytes(int bytes, Site site);
// True if SIMT_DROP names this site; also notes it for SIMT_SITES.
bool dropped(Site site, const char* kind);

// --- Launching ------------------------------------------------------------------------------------------------------

struct Grid { dim3 blocks, threads; size_t dynamic_bytes; const char* file; int line; const char* text; };
void run_grid(const Grid& grid, void (*thread)(void*), void* arguments);

// A kernel and its arguments, copied at the launch.
template <class Kernel, class Arguments>
struct Call {
  Kernel kernel;
  Arguments arguments;
  static void thread(void* self) {
    auto* call = static_cast<Call*>(self);
    std::apply(call->kernel, call->arguments);
  }
};

}  // namespace simt
