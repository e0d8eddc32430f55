// Built with ThreadSanitizer: planted races are reported with file and line, whatever the schedule; correct kernels are
// silent. Kernels are compiled with -fsanitize=thread, the runtime (*.cpp beside this) without. Where mmap_rnd_bits is
// above 28 the sanitizer may refuse to start: run under `setarch -R`.
#include <gtest/gtest.h>

#include <vector>

#include "dev/tests/simt/memory.h"
#include "dev/tests/simt/examples.cuh"

namespace {

// One report ends the process, so that each test sees the first race only.
extern "C" const char* __tsan_default_options() { return "halt_on_error=1:exitcode=66:atexit_sleep_ms=0"; }

// Two blocks that write the same word, the same value: no schedule shows it.
template <bool racy>
__global__ void same_word(float* out) {
  if (threadIdx.x == 0) out[racy ? 0 : blockIdx.x] = 1.0f;
}
// All threads of a block write one word of global memory.
template <bool racy>
__global__ void last_one_wins(float* out) {
  if (!racy && threadIdx.x != 0) return;
  out[blockIdx.x] = 2.0f;
}
// A shuffle orders no memory: the write before it may be unseen by the reader behind it.
template <bool racy>
__global__ void shuffle_is_no_barrier(float* out) {
  SHARED(float, tile, [32]);
  const unsigned i = threadIdx.x;
  tile[i] = static_cast<float>(i);
  const float x = __shfl_xor_sync(all_lanes, 1.0f, 1);
  if (!racy) __syncwarp();
  out[i] = x + tile[31 - i];
}
// A write between two barriers, read by others between the same two. A detector that used one object for all barriers
// would see the writer's arrival at the second when the reader leaves the first, and be silent.
template <bool racy>
__global__ void write_between_barriers(float* out) {
  SHARED(float, word, [1]);
  if (threadIdx.x == 0) word[0] = 1.0f;
  __syncthreads();
  if (threadIdx.x == 0 && racy) word[0] = 2.0f;
  if (threadIdx.x != 0) out[threadIdx.x] = word[0];
  __syncthreads();
  out[threadIdx.x] = word[0];
}
template <bool racy>
__global__ void write_between_warp_barriers(float* out) {
  SHARED(float, word, [1]);
  if (threadIdx.x == 0) word[0] = 1.0f;
  __syncwarp();
  if (threadIdx.x == 0 && racy) word[0] = 2.0f;
  if (threadIdx.x != 0) out[threadIdx.x] = word[0];
  __syncwarp();
  out[threadIdx.x] = word[0];
}
template <bool racy>
__global__ void counter(int* out) {
  if (racy) {
    out[0] += 1;
  } else {
    atomicAdd(out, 1);
  }
}

template <Plant plant>
void reverse() {
  simt::Buffer<float> in(std::vector<float>(256, 1.0f)), out(256);
  launch(reverse_blocks<plant>, 4, 64, 0, nullptr, out.data(), in.data());
}
template <Plant plant>
void neighbours() {
  simt::Buffer<float> in(std::vector<float>(64, 1.0f)), out(64);
  launch(warp_neighbours<plant>, 1, 64, 0, nullptr, out.data(), in.data());
}
template <Plant plant>
void gemm() {
  simt::Buffer<uint16_t> A(std::vector<uint16_t>(128 * 192, 0x3f80)), B(std::vector<uint16_t>(192 * 64, 0x3f80));
  simt::Buffer<float> C(128 * 64);
  gemm_example_gpu<plant>(C.data(), A.data(), B.data(), 128, 64, 192, nullptr);
}
void sums() {
  simt::Buffer<float> in(std::vector<float>(4 * 100, 1.0f)), out(4);
  row_sums_gpu(out.data(), in.data(), 4, 100, nullptr);
}
void layernorm() {
  const int N = 20, C = 48;
  simt::Buffer<float> in(std::vector<float>(N * C, 1.0f)), w(std::vector<float>(C, 1.0f)), out(N * C), mean(N), rstd(N);
  layernorm_example_gpu(out.data(), mean.data(), rstd.data(), in.data(), w.data(), w.data(), N, C, nullptr);
}
void run(void (*kernel)(float*), unsigned blocks) {
  simt::Buffer<float> out(64);
  launch(kernel, blocks, 32, 0, nullptr, out.data());
}
void count(void (*kernel)(int*)) {
  simt::Buffer<int> out(std::vector<int>(1, 0));
  launch(kernel, 2, 32, 0, nullptr, out.data());
}

// Every test in a fresh process, in all schedules and both extremes of cp.async.
template <class Run>
void quietly(Run run) {
  using S = simt::Schedule;
  for (const auto schedule : {S::forward, S::reverse, S::random, S::ahead})
    for (const auto async : {simt::Async::at_issue, simt::Async::at_wait}) {
      simt::options().schedule = schedule;
      simt::options().async = async;
      run();
    }
  exit(0);
}

#define EXPECT_SILENT(statement) EXPECT_EXIT(quietly([] { statement; }), testing::ExitedWithCode(0), "^$")
// `where`: the end of the summary line, "file:line in function".
#define EXPECT_RACE(statement, where) \
  EXPECT_EXIT({ statement; exit(0); }, testing::ExitedWithCode(66), "SUMMARY: ThreadSanitizer: data race .*" where)

TEST(RaceDeath, correct_kernels_are_silent) {
  EXPECT_SILENT(reverse<Plant::none>());
  EXPECT_SILENT(neighbours<Plant::none>());
  EXPECT_SILENT(gemm<Plant::none>());
  EXPECT_SILENT(sums());
  EXPECT_SILENT(layernorm());
  EXPECT_SILENT(run(same_word<false>, 2));
  EXPECT_SILENT(run(last_one_wins<false>, 2));
  EXPECT_SILENT(run(shuffle_is_no_barrier<false>, 1));
  EXPECT_SILENT(run(write_between_barriers<false>, 1));
  EXPECT_SILENT(run(write_between_warp_barriers<false>, 1));
  EXPECT_SILENT(count(counter<false>));
}
TEST(RaceDeath, missing_syncthreads) {
  EXPECT_RACE(reverse<Plant::missing_barrier>(), "examples.cuh:[0-9]+ in reverse_blocks");
}
TEST(RaceDeath, missing_syncwarp) {
  EXPECT_RACE(neighbours<Plant::missing_barrier>(), "examples.cuh:[0-9]+ in warp_neighbours");
  EXPECT_RACE(neighbours<Plant::missing_second_barrier>(), "examples.cuh:[0-9]+ in warp_neighbours");
}
TEST(RaceDeath, missing_barriers_around_cp_async_and_ldmatrix) {
  EXPECT_RACE(gemm<Plant::missing_barrier>(), "in .*ldmatrix");
  EXPECT_RACE(gemm<Plant::missing_second_barrier>(), "in .*copy_async");
}
TEST(RaceDeath, between_blocks) { EXPECT_RACE(run(same_word<true>, 2), "race_test.cpp:[0-9]+ in same_word"); }
TEST(RaceDeath, threads_writing_one_word) {
  EXPECT_RACE(run(last_one_wins<true>, 1), "race_test.cpp:[0-9]+ in last_one_wins");
}
TEST(RaceDeath, shuffle_is_no_barrier) {
  EXPECT_RACE(run(shuffle_is_no_barrier<true>, 1), "race_test.cpp:[0-9]+ in shuffle_is_no_barrier");
}
TEST(RaceDeath, between_two_barriers) {
  EXPECT_RACE(run(write_between_barriers<true>, 1), "race_test.cpp:[0-9]+ in write_between_barriers");
  EXPECT_RACE(run(write_between_warp_barriers<true>, 1), "race_test.cpp:[0-9]+ in write_between_warp_barriers");
}
TEST(RaceDeath, plain_counter) { EXPECT_RACE(count(counter<true>), "race_test.cpp:[0-9]+ in counter"); }

}  // namespace
