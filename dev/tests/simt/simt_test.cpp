// The emulation itself: examples against plain loops under every order of execution, collectives against their
// definition, schedules and poison. faults_test.cpp plants faults.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "dev/tests/simt/example_runs.h"

namespace {

// --- Examples: the right result, and the same bits in every order ---------------------------------------------------

TEST(Examples, reverse_blocks) {
  std::vector<float> out;
  EXPECT_EQ(run_reverse<Plant::none>(&out), "");
  const std::vector<float> in = normal(512, 1);
  for (size_t i = 0; i < 512; i++) EXPECT_EQ(out[i], in[i / 64 * 64 + 63 - i % 64]);
}

TEST(Examples, warp_neighbours) {
  std::vector<float> out;
  EXPECT_EQ(run_neighbours<Plant::none>(&out), "");
  const std::vector<float> in = normal(96, 2);
  // After the first round both hold the same sum, which then doubles twice.
  for (size_t i = 0; i < 96; i++) EXPECT_EQ(out[i], 4 * (in[i] + in[i ^ 1]));
}

TEST(Examples, row_sums) {
  const int B = 3, n = 1000;
  const std::vector<float> x = normal(B * n, 3);
  simt::Buffer<float> in(x, "in");
  std::vector<float> out;
  EXPECT_EQ(simt::differing_order([&] {
    simt::Buffer<float> sums(B, "out");
    row_sums_gpu(sums.data(), in.data(), B, n, nullptr);
    return sums.values();
  }, &out), "");
  for (int b = 0; b < B; b++) {
    double sum = 0, magnitude = 0;
    for (int i = 0; i < n; i++) sum += x[b * n + i], magnitude += std::fabs(x[b * n + i]);
    // 16 additions deep (8 a thread, 5 + 2 across lanes and warps): half an ulp of the magnitude each.
    EXPECT_NEAR(out[b], sum, 16 * 0x1p-24 * magnitude);
  }
}

TEST(Examples, layernorm) {
  const int N = 13, C = 384;  // the last block has idle warps
  const std::vector<float> x = normal(N * C, 4), w = normal(C, 5), b = normal(C, 6);
  simt::Buffer<float> in(x, "in"), weight(w, "weight"), bias(b, "bias");
  std::vector<float> result;
  EXPECT_EQ(simt::differing_order([&] {
    simt::Buffer<float> out(N * C, "out"), mean(N, "mean"), rstd(N, "rstd");
    layernorm_example_gpu(out.data(), mean.data(), rstd.data(), in.data(), weight.data(), bias.data(), N, C, nullptr);
    std::vector<float> all = out.values(), m = mean.values(), r = rstd.values();
    all.insert(all.end(), m.begin(), m.end());
    all.insert(all.end(), r.begin(), r.end());
    return all;
  }, &result), "");
  for (int n = 0; n < N; n++) {
    double mean = 0, variance = 0;
    for (int c = 0; c < C; c++) mean += x[n * C + c] / C;
    for (int c = 0; c < C; c++) variance += (x[n * C + c] - mean) * (x[n * C + c] - mean) / C;
    const double rstd = 1 / std::sqrt(variance + 1e-5);
    // 17 additions deep, values of order 1 to 4: 1e-5 leaves a factor of ten.
    EXPECT_NEAR(result[N * C + n], mean, 1e-6);
    EXPECT_NEAR(result[N * C + N + n], rstd, 1e-6);
    for (int c = 0; c < C; c++) EXPECT_NEAR(result[n * C + c], (x[n * C + c] - mean) * rstd * w[c] + b[c], 1e-5);
  }
}

TEST(Examples, gemm) {
  for (const auto& [M, N, K] : {std::tuple{64, 64, 64}, {100, 72, 192}, {1, 8, 128}}) {
    std::vector<float> result;
    EXPECT_EQ(run_gemm<Plant::none>(M, N, K, &result), "");
    EXPECT_EQ(gemm_errors(M, N, K, result), 0) << M << " " << N << " " << K;
  }
}

TEST(Examples, swizzle_has_no_bank_conflicts) {
  simt::counters() = {};
  std::vector<float> result;
  run_gemm<Plant::none>(64, 64, 64, &result);
  EXPECT_EQ(simt::counters().conflicts, 0u);
  EXPECT_GT(simt::counters().ldmatrix_tiles, 0u);
}

// --- Warp collectives against their definition ----------------------------------------------------------------------

template <class T>
__global__ void all_collectives(T* out, const T* in, int* votes) {
  const int lane = static_cast<int>(threadIdx.x);
  const T x = in[lane];
  out[0 * 32 + lane] = __shfl_sync(all_lanes, x, (lane * 7 + 3) % 32);
  out[1 * 32 + lane] = __shfl_sync(all_lanes, x, lane + 1, 8);
  out[2 * 32 + lane] = __shfl_xor_sync(all_lanes, x, 5);
  out[3 * 32 + lane] = __shfl_up_sync(all_lanes, x, 3u);
  out[4 * 32 + lane] = __shfl_down_sync(all_lanes, x, 3u, 16);
  votes[0 * 32 + lane] = static_cast<int>(__ballot_sync(all_lanes, lane % 3 == 0));
  votes[1 * 32 + lane] = __any_sync(all_lanes, lane == 17);
  votes[2 * 32 + lane] = __all_sync(all_lanes, lane != 17);
  votes[3 * 32 + lane] = __reduce_add_sync(all_lanes, lane - 16);
  votes[4 * 32 + lane] = __reduce_min_sync(all_lanes, lane - 16);
  votes[5 * 32 + lane] = static_cast<int>(__reduce_max_sync(all_lanes, static_cast<unsigned>(lane - 16)));
}

template <class T>
void check_collectives() {
  std::vector<T> x(32);
  for (int i = 0; i < 32; i++) x[i] = static_cast<T>(100 + i);
  simt::Buffer<T> in(x), out(5 * 32);
  simt::Buffer<int> votes(6 * 32);
  launch(all_collectives<T>, 1, 32, 0, nullptr, out.data(), in.data(), votes.data());
  const std::vector<T> r = out.values();
  const std::vector<int> v = votes.values();
  for (int i = 0; i < 32; i++) {
    EXPECT_EQ(r[i], 100 + (i * 7 + 3) % 32);
    EXPECT_EQ(r[32 + i], 100 + i / 8 * 8 + (i + 1) % 8);
    EXPECT_EQ(r[64 + i], 100 + (i ^ 5));
    EXPECT_EQ(r[96 + i], 100 + (i < 3 ? i : i - 3));
    EXPECT_EQ(r[128 + i], 100 + (i % 16 + 3 > 15 ? i : i + 3));
    EXPECT_EQ(static_cast<unsigned>(v[i]), 0x49249249u);
    EXPECT_EQ(v[32 + i], 1);
    EXPECT_EQ(v[64 + i], 0);
    EXPECT_EQ(v[96 + i], -16);
    EXPECT_EQ(v[128 + i], -16);
    EXPECT_EQ(v[160 + i], -1);
  }
}
TEST(Warp, collectives_of_4_and_8_bytes) {
  check_collectives<float>();
  check_collectives<int>();
  check_collectives<double>();
  check_collectives<long long>();
}

// --- Schedules and poison -------------------------------------------------------------------------------------------

// order (2 * threads): who runs as 1st, 2nd, ... before and after a barrier of its warp.
template <int kind>
__global__ void who_runs_when(int* order, int* ticket) {
  const int thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  order[atomicAdd(ticket, 1)] = thread;
  __syncwarp();
  order[atomicAdd(ticket, 1)] = thread;
}
std::vector<int> order_of(simt::Schedule schedule, uint64_t seed, int blocks = 1) {
  const int threads = 64;
  const simt::Options before = simt::options();
  simt::options().schedule = schedule;
  simt::options().seed = seed;
  simt::Buffer<int> order(2 * static_cast<size_t>(threads * blocks)), ticket(std::vector<int>(1, 0));
  launch(who_runs_when<0>, blocks, threads, 0, nullptr, order.data(), ticket.data());
  simt::options() = before;
  return order.values();
}
TEST(Schedules, are_what_they_say) {
  using S = simt::Schedule;
  const std::vector<int> forward = order_of(S::forward, 1), reverse = order_of(S::reverse, 1);
  const std::vector<int> ahead = order_of(S::ahead, 1);
  for (int i = 0; i < 64; i++) {
    EXPECT_EQ(forward[i], i);
    EXPECT_EQ(reverse[i], 63 - i);
    EXPECT_EQ(ahead[i] / 32, 0) << "warp 0 runs through its barrier before warp 1 starts";
    EXPECT_EQ(ahead[64 + i] / 32, 1);
  }
  EXPECT_EQ(ahead[32], 31) << "who completes the barrier runs on";
  std::vector<int> random = order_of(S::random, 1);
  EXPECT_EQ(random, order_of(S::random, 1));
  EXPECT_NE(random, order_of(S::random, 2));
  std::sort(random.begin(), random.end());
  for (int i = 0; i < 128; i++) EXPECT_EQ(random[i], i / 2);
}
TEST(Schedules, order_blocks_too) {
  using S = simt::Schedule;
  std::vector<int> random;
  const std::vector<int> forward = order_of(S::forward, 1, 6), reverse = order_of(S::reverse, 1, 6);
  for (int b = 0; b < 6; b++) {
    EXPECT_EQ(forward[128 * b] / 64, b);
    EXPECT_EQ(reverse[128 * b] / 64, 5 - b);
    random.push_back(order_of(S::random, 5, 6)[128 * b] / 64);
  }
  EXPECT_TRUE(std::is_permutation(random.begin(), random.end(), std::vector<int>{0, 1, 2, 3, 4, 5}.begin()));
}

template <int kind>
__global__ void read_uninitialised(unsigned* out) {
  SHARED(unsigned, fixed, [8]);
  SHARED_DYNAMIC(unsigned, dynamic);
  out[2 * blockIdx.x] = fixed[threadIdx.x];
  out[2 * blockIdx.x + 1] = dynamic[threadIdx.x];
  fixed[threadIdx.x] = dynamic[threadIdx.x] = 1;
}
TEST(Poison, fills_shared_memory_in_every_block_and_buffers) {
  simt::Buffer<unsigned> out(7);
  launch(read_uninitialised<0>, 3, 1, 16, nullptr, out.data());
  for (const unsigned word : out.values()) EXPECT_EQ(word, simt::options().poison);
  float x;
  memcpy(&x, &simt::options().poison, sizeof x);
  EXPECT_TRUE(std::isnan(x));
  EXPECT_TRUE(std::isnan(bf16_bits_to_float(static_cast<uint16_t>(simt::options().poison))));
}

TEST(Portable, bf16_rounds_to_nearest_even) {
  EXPECT_EQ(float_to_bf16_bits(1.0f), 0x3f80);
  EXPECT_EQ(float_to_bf16_bits(1.00390625f), 0x3f80);           // halfway, down to even
  EXPECT_EQ(float_to_bf16_bits(1.01171875f), 0x3f82);           // halfway, up to even
  EXPECT_EQ(float_to_bf16_bits(std::nextafter(1.00390625f, 2.0f)), 0x3f81);
  EXPECT_EQ(float_to_bf16_bits(3.4e38f), 0x7f80);               // overflow
  EXPECT_EQ(float_to_bf16_bits(-NAN), 0x7fff);
  EXPECT_EQ(pack_bf16(1.0f, -2.0f), 0xc0003f80u);
}

// As on hardware, a thread that has returned no longer counts at barriers, and its lane is no longer alive.
template <int kind>
__global__ void some_return(float* out) {
  if (threadIdx.x >= 40) return;
  __syncthreads();
  out[threadIdx.x] = 1.0f;
  __syncthreads();
  if (threadIdx.x < 32) return;
  __syncwarp(0xffu);
  out[threadIdx.x] = __shfl_xor_sync(0xffu, out[threadIdx.x], 7) + 1.0f;
}
TEST(Warp, returned_threads_do_not_count) {
  std::vector<float> result;
  EXPECT_EQ(simt::differing_order([&] {
    simt::Buffer<float> out(40);
    launch(some_return<0>, 1, 96, 0, nullptr, out.data());
    return out.values();
  }, &result), "");
  for (int i = 0; i < 40; i++) EXPECT_EQ(result[i], i < 32 ? 1.0f : 2.0f);
}

}  // namespace
