// Planted faults, each of which must be found: by results that differ between orders of execution, or by a report.
#include <gtest/gtest.h>

#include "dev/tests/simt/example_runs.h"

namespace {

TEST(Faults, missing_barriers_change_results_between_orders) {
  std::vector<float> r;
  EXPECT_NE(run_reverse<Plant::missing_barrier>(&r), "");
  EXPECT_NE(run_neighbours<Plant::missing_barrier>(&r), "");
  EXPECT_NE(run_neighbours<Plant::missing_second_barrier>(&r), "");
  EXPECT_NE(run_gemm<Plant::missing_barrier>(64, 64, 192, &r), "");
  EXPECT_NE(run_gemm<Plant::missing_second_barrier>(64, 64, 192, &r), "");
}

TEST(Faults, missing_wait_for_cp_async_leaves_poison) {
  std::vector<float> r;
  const std::string order = run_gemm<Plant::missing_wait>(64, 64, 64, &r);
  EXPECT_NE(order.find("SIMT_ASYNC=wait"), std::string::npos) << order;
}

TEST(Faults, wrong_swizzle_gives_wrong_products) {
  std::vector<float> r;
  EXPECT_EQ(run_gemm<Plant::wrong_swizzle>(64, 64, 64, &r), "");
  EXPECT_GT(gemm_errors(64, 64, 64, r), 0);
}

// What the runtime says, or AddressSanitizer and UndefinedBehaviorSanitizer in the builds that have them.
std::string sanitized_or(const std::string& message) {
  return simt::under_asan() ? "use-after-poison|heap-buffer-overflow|out of bounds|SEGV on unknown address" : message;
}

template <Plant plant>
void sums(int n) {
  simt::Buffer<float> in(normal(static_cast<size_t>(n), 9), "in"), out(1, "out");
  row_sums_gpu<plant>(out.data(), in.data(), 1, n, nullptr);
}

TEST(FaultsDeath, lanes_at_different_shuffles) {
  EXPECT_DEATH(sums<Plant::divergent_shuffle>(128),
               "lanes of one warp met in different collectives: lanes 0-4 in __shfl_xor_sync at .*examples.cuh:[0-9]+, "
               "lane 5 in __shfl_xor_sync at .*examples.cuh:[0-9]+");
}
TEST(FaultsDeath, barrier_that_not_all_reach) {
  EXPECT_DEATH(sums<Plant::barrier_in_branch>(128), "threads of one block met at different barriers");
}
TEST(FaultsDeath, write_past_shared_memory) {
  EXPECT_DEATH(sums<Plant::past_the_end>(128),
               sanitized_or("write past shared memory: byte 1[0-9]* of `partial`, which has 128 bytes"));
}
TEST(FaultsDeath, misaligned_row_of_ldmatrix) {
  std::vector<float> r;
  EXPECT_DEATH(run_gemm<Plant::misaligned_row>(64, 64, 64, &r), "misaligned: ldmatrix_x4 at .*examples.cuh:");
}

// An extra row read and never used changes no result: only the page behind the array shows it.
TEST(FaultsDeath, off_by_one_row) {
  std::vector<float> r;
  EXPECT_DEATH(run_gemm<Plant::off_by_one_row>(63, 64, 64, &r),
               sanitized_or("memory fault at .* of `A` \\(8064 bytes\\)"));
}

template <int kind>
__global__ void faulty(float* out) {
  SHARED(float, tile, [8]);
  if (kind == 0) {  // half a warp at a barrier, the other half in a shuffle
    if (threadIdx.x % 32 < 16) __syncthreads();
    out[threadIdx.x] = __shfl_sync(all_lanes, 1.0f, 0);
  }
  if (kind == 1) {  // lanes that left, and a mask that still names them
    if (threadIdx.x % 32 >= 30) return;
    out[threadIdx.x] = __shfl_sync(all_lanes, 1.0f, 0);
  }
  if (kind == 2) {  // a mask of those in the branch only
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 0);
  }
  if (kind == 3) cp_async_16(to_shared(&tile[4]), out + 1);
  if (kind == 4) cp_async_16(to_shared(&tile[0]) + 32, out);
  if (kind == 5) to_shared(out);
  if (kind == 6) store16(out + 2, Vec16<float>{});
  if (kind == 7) out[threadIdx.x] = 0.0f;
}
template <int kind>
void run_faulty(int threads = 64) {
  simt::Buffer<float> out(64, "out");
  launch(faulty<kind>, 1, threads, 0, nullptr, out.data());
}

TEST(FaultsDeath, half_a_warp_at_a_barrier_is_stuck) {
  EXPECT_DEATH(run_faulty<0>(), "stuck: .*lanes 0-15 of its warp.*warp 0, lanes 0-15: wait in __syncthreads at");
}
TEST(FaultsDeath, mask_and_live_lanes) {
  EXPECT_DEATH(run_faulty<1>(), "lane 30 returned while lanes 0-29 of its warp wait for it");
  EXPECT_DEATH(run_faulty<2>(), "mask 0000ffff, but the lanes alive in this warp are ffffffff");
}
TEST(FaultsDeath, addresses) {
  EXPECT_DEATH(run_faulty<3>(), "misaligned: source of cp_async_16 at .*faults_test.cpp:");
  EXPECT_DEATH(run_faulty<4>(), "outside of shared memory: destination of cp_async_16 at .*from byte 32 of `tile`");
  EXPECT_DEATH(run_faulty<5>(), "is no address in shared memory");
  EXPECT_DEATH(run_faulty<6>(), "misaligned: 16-byte access at .*faults_test.cpp:");
}
TEST(FaultsDeath, launches_that_a_gpu_refuses) {
  EXPECT_DEATH(launch(faulty<9>, dim3(1, 65536), 32, 0, nullptr, nullptr), "a grid of 1x65536x1 blocks");
  EXPECT_DEATH(launch(faulty<9>, 0, 32, 0, nullptr, nullptr), "a grid of 0x1x1 blocks");
  EXPECT_DEATH(launch(faulty<9>, 1, 1025, 0, nullptr, nullptr), "blocks of 1025x1x1 threads");
  EXPECT_DEATH(launch(faulty<9>, 1, 32, 233 << 10, nullptr, nullptr), "bytes of dynamic shared memory");
}
struct Inside { float* p; };
template <int kind>
__global__ void write_inside(Inside x) { x.p[threadIdx.x] = 0.0f; }
TEST(FaultsDeath, use_after_free) {
  float* p = static_cast<float*>(simt::allocate(256, 256, "gone"));
  simt::release(p);
  EXPECT_DEATH(launch(faulty<7>, 1, 32, 0, nullptr, p), "an argument points to freed memory: byte 0 of `gone`");
  EXPECT_DEATH(launch(write_inside<0>, 1, 32, 0, nullptr, Inside{p}),
               sanitized_or("memory fault at .*: byte 0 of `gone` .*was freed"));
  EXPECT_DEATH(simt::release(p), "is no live allocation: byte 0 of `gone` .*was freed");
}
template <int depth>
__global__ void deep(float* out) {
  volatile char frame[256 << 10];
  for (size_t i = sizeof frame; i-- > 0;) frame[i] = 1;
  out[threadIdx.x] = frame[threadIdx.x];
}
TEST(FaultsDeath, stack_overflow) {
  if (simt::under_asan()) GTEST_SKIP() << "stacks are larger there";
  simt::Buffer<float> out(32);
  EXPECT_DEATH(launch(deep<0>, 1, 32, 0, nullptr, out.data()), "a CUDA thread's stack overflowed");
}
TEST(FaultsDeath, write_past_a_buffer) {
  EXPECT_DEATH(run_faulty<7>(65), sanitized_or("memory fault at .*: byte 256 of `out` \\(256 bytes\\)"));
  // Not up to a 16-byte boundary: guard bytes.
  EXPECT_DEATH({ simt::Buffer<char> b(5, "b"); b.data()[5] = 1; }, sanitized_or("write past `b`: byte 5 of 5"));
  EXPECT_DEATH({ simt::Buffer<char> b(5, "b"); b.data()[-1] = 1; }, sanitized_or("write 1 bytes before `b`"));
}

}  // namespace
