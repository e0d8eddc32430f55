// The emulated runtime library: what correct host code may rely on, and which misuse is reported.
#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "dev/tests/simt/memory.h"
#include "kernels/portable.cuh"

namespace {

template <int kind = 0>
__global__ void add_one(float* x, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) x[i] += 1.0f;
}
void add_one_to(float* x, int n, cudaStream_t stream) { launch(add_one<>, (n + 31) / 32, 32, 0, stream, x, n); }

using simt::Streams;

struct Runtime : testing::TestWithParam<Streams> {
  void SetUp() override { simt::options().streams = GetParam(); }
  void TearDown() override { simt::options().streams = Streams::eager; }
};
const char* name(const testing::TestParamInfo<Streams>& i) {
  const char* const names[] = {"eager", "lazy", "racing"};
  return names[static_cast<int>(i.param)];
}
INSTANTIATE_TEST_SUITE_P(Streams, Runtime, testing::Values(Streams::eager, Streams::lazy, Streams::racing), name);

TEST_P(Runtime, copies_and_kernels_in_order_on_one_stream) {
  const int n = 100;
  float *device, *host;
  cudaStream_t stream;
  ASSERT_EQ(cudaMalloc(&device, n * sizeof(float)), cudaSuccess);
  ASSERT_EQ(cudaMallocHost(&host, n * sizeof(float)), cudaSuccess);
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(device) % 256, 0u);
  for (int i = 0; i < n; i++) host[i] = static_cast<float>(i);
  cudaMemcpyAsync(device, host, n * sizeof(float), cudaMemcpyHostToDevice, stream);
  add_one_to(device, n, stream);
  cudaMemcpyAsync(host, device, n * sizeof(float), cudaMemcpyDeviceToHost, stream);
  EXPECT_EQ(host[5], GetParam() == Streams::eager ? 6.0f : 5.0f);  // what a host may see that doesn't wait
  cudaStreamSynchronize(stream);
  for (int i = 0; i < n; i++) EXPECT_EQ(host[i], static_cast<float>(i + 1));
  cudaMemsetAsync(device, 0, 4 * sizeof(float), stream);
  std::vector<float> pageable(n);
  cudaMemcpy(pageable.data(), device, n * sizeof(float), cudaMemcpyDeviceToHost);  // waits for the stream
  EXPECT_EQ(pageable[3], 0.0f);
  EXPECT_EQ(pageable[4], 5.0f);
  cudaFree(device);
  cudaFreeHost(host);
  cudaStreamDestroy(stream);
  EXPECT_EQ(simt::allocated_bytes(), 0u);
}

// A second stream must wait for the first by an event; without it the copy reads what it finds. The host waits for the
// second one, if asked for the first one before it.
float value_seen_by_second_stream(bool wait, bool host_waits_for_both) {
  float *device, *host;
  cudaStream_t first, second;
  cudaEvent_t done;
  cudaMalloc(&device, sizeof(float));
  cudaMallocHost(&host, sizeof(float));
  cudaStreamCreate(&first);
  cudaStreamCreate(&second);
  cudaEventCreateWithFlags(&done, cudaEventDisableTiming);
  cudaMemset(device, 0, sizeof(float));
  add_one_to(device, 1, first);
  cudaEventRecord(done, first);
  if (wait) cudaStreamWaitEvent(second, done);
  cudaMemcpyAsync(host, device, sizeof(float), cudaMemcpyDeviceToHost, second);
  if (host_waits_for_both) cudaStreamSynchronize(first);
  cudaStreamSynchronize(second);
  const float seen = *host;
  cudaDeviceSynchronize();
  cudaEventDestroy(done);
  cudaStreamDestroy(first);
  cudaStreamDestroy(second);
  cudaFree(device);
  cudaFreeHost(host);
  return seen;
}
TEST_P(Runtime, events_order_streams) {
  EXPECT_EQ(value_seen_by_second_stream(true, false), 1.0f);
  EXPECT_EQ(value_seen_by_second_stream(true, true), 1.0f);
  // Each of the two late orders shows a missing event that the other one hides.
  EXPECT_EQ(value_seen_by_second_stream(false, false), GetParam() == Streams::lazy ? 0.0f : 1.0f);
  EXPECT_EQ(value_seen_by_second_stream(false, true), GetParam() == Streams::racing ? 0.0f : 1.0f);
}

TEST_P(Runtime, a_captured_graph_replays_on_two_streams) {
  float* device;
  cudaStream_t stream, side;
  cudaEvent_t fork, join;
  cudaMalloc(&device, 2 * sizeof(float));
  cudaMemset(device, 0, 2 * sizeof(float));
  cudaStreamCreate(&stream);
  cudaStreamCreate(&side);
  cudaEventCreate(&fork);
  cudaEventCreate(&join);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  add_one_to(device, 1, stream);
  cudaEventRecord(fork, stream);
  cudaStreamWaitEvent(side, fork);
  add_one_to(device + 1, 1, side);
  cudaEventRecord(join, side);
  cudaStreamWaitEvent(stream, join);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorStreamCaptureUnsupported);
  cudaGetLastError();
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph), cudaSuccess);
  for (int i = 0; i < 3; i++) cudaGraphLaunch(exec, stream);
  float seen[2];
  cudaMemcpy(seen, device, sizeof seen, cudaMemcpyDeviceToHost);
  EXPECT_EQ(seen[0], 3.0f);  // three replays; capturing itself runs nothing
  EXPECT_EQ(seen[1], 3.0f);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaEventDestroy(fork);
  cudaEventDestroy(join);
  cudaStreamDestroy(stream);
  cudaStreamDestroy(side);
  cudaFree(device);
}

TEST(RuntimeErrors, come_back_as_codes) {
  void* p;
  setenv("SIMT_MEMORY", "1000", 1);
  EXPECT_EQ(cudaMalloc(&p, 1001), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  unsetenv("SIMT_MEMORY");
  int n;
  setenv("SIMT_DEVICES", "0", 1);
  EXPECT_EQ(cudaGetDeviceCount(&n), cudaErrorNoDevice);
  EXPECT_EQ(n, 0);
  setenv("SIMT_DEVICES", "-1", 1);
  EXPECT_EQ(cudaGetDeviceCount(&n), cudaErrorInsufficientDriver);
  cudaDriverGetVersion(&n);
  EXPECT_EQ(n, 0);
  unsetenv("SIMT_DEVICES");
  EXPECT_EQ(cudaSetDevice(1), cudaErrorInvalidDevice);
  cudaGetLastError();
}

TEST(RuntimeErrorsDeath, misuse_is_reported) {
  float* device;
  std::vector<float> host(10);
  cudaMalloc(&device, 40);
  EXPECT_DEATH(cudaMemcpy(device, host.data(), 44, cudaMemcpyHostToDevice), "destination: 44 bytes from byte 0 of");
  EXPECT_DEATH(cudaMemcpy(host.data(), device + 8, 12, cudaMemcpyDeviceToHost), "source: 12 bytes from byte 32 of");
  EXPECT_DEATH(cudaMemcpy(host.data(), device, 40, cudaMemcpyHostToDevice), "destination is host memory");
  EXPECT_DEATH(cudaMemcpy(device, device, 40, cudaMemcpyHostToDevice), "source is device memory");
  EXPECT_DEATH(cudaMemset(host.data(), 0, 40), "destination is host memory");
  EXPECT_DEATH(add_one_to(host.data(), 10, nullptr), "launch\\(add_one<>.*is host memory, a device pointer belongs");
  EXPECT_DEATH(cudaFree(host.data()), "no live allocation");
  EXPECT_DEATH(cudaFreeHost(device), "cudaFreeHost of byte 0 of `cudaMalloc");
  EXPECT_DEATH(cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(host.data())), "the stream .* doesn't exist");
  cudaFree(device);
  EXPECT_DEATH(cudaFree(device), "which was freed");
  EXPECT_DEATH(cudaMemset(device, 0, 4), "was freed");
  EXPECT_DEATH(add_one_to(device, 10, nullptr), "points to freed memory");
}

// Pinned memory that is overwritten before its copy ran: only lazy streams show it.
TEST(RuntimeErrors, lazy_streams_show_a_buffer_reused_too_early) {
  for (const Streams streams : {Streams::eager, Streams::lazy}) {
    simt::options().streams = streams;
    float *device, *staging, seen;
    cudaStream_t stream;
    cudaMalloc(&device, sizeof(float));
    cudaMallocHost(&staging, sizeof(float));
    cudaStreamCreate(&stream);
    *staging = 1.0f;
    cudaMemcpyAsync(device, staging, sizeof(float), cudaMemcpyHostToDevice, stream);
    *staging = 2.0f;
    cudaStreamSynchronize(stream);
    cudaMemcpy(&seen, device, sizeof(float), cudaMemcpyDeviceToHost);
    EXPECT_EQ(seen, streams == Streams::lazy ? 2.0f : 1.0f);
    cudaFree(device);
    cudaFreeHost(staging);
    cudaStreamDestroy(stream);
  }
  simt::options().streams = Streams::eager;
}

}  // namespace
