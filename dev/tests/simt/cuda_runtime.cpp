#include "dev/tests/simt/cuda_runtime.h"

#include <chrono>
#include <cstdlib>
#include <deque>
#include <memory>
#include <set>
#include <utility>

#include "dev/tests/simt/engine.h"
#include "dev/tests/simt/memory.h"
#include "dev/tests/simt/streams.h"

using simt::fail;
using Clock = std::chrono::steady_clock;

// A piece of queued work that may first need other streams to get somewhere.
struct Step { std::function<void()> work; cudaEvent_t after; unsigned long recording; };

struct CUgraph_st { std::vector<Step> steps; };
struct CUgraphExec_st { std::vector<Step> steps; };
struct CUstream_st { std::deque<Step> queue; CUgraph_st* capture = nullptr; bool origin = false; };
struct CUevent_st {
  cudaStream_t stream = nullptr;  // that of the newest recording
  unsigned long recorded = 0, reached = 0;
  CUgraph_st* capture = nullptr;
  bool timing = true;
  Clock::time_point time;
};

namespace {

constexpr size_t device_bytes_default = size_t{4} << 30;
cudaError_t last_error = cudaSuccess;
int current_device = 0;
// All that exist, so that a destroyed or garbage handle is recognised.
std::set<cudaStream_t> streams;
std::set<cudaEvent_t> events;

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

long setting(const char* name, long otherwise) {
  const char* s = getenv(name);
  return s ? strtol(s, nullptr, 0) : otherwise;
}
// SIMT_DEVICES: how many GPUs there seem to be; -1: no driver either.
int device_count() { return static_cast<int>(setting("SIMT_DEVICES", 1)); }
// SIMT_MEMORY: bytes of the emulated GPU.
size_t device_bytes() { return static_cast<size_t>(setting("SIMT_MEMORY", static_cast<long>(device_bytes_default))); }

cudaError_t need_device() {
  return device_count() < 0 ? cudaErrorInsufficientDriver : device_count() == 0 ? cudaErrorNoDevice : cudaSuccess;
}

void need_stream(cudaStream_t stream, const char* call) {
  if (stream && !streams.count(stream)) fail("%s: the stream %p doesn't exist", call, static_cast<void*>(stream));
}
void need_event(cudaEvent_t event, const char* call) {
  if (!events.count(event)) fail("%s: the event %p doesn't exist", call, static_cast<void*>(event));
}

void run_until(cudaEvent_t event, unsigned long recording);

void run_first(CUstream_st& stream);

// Streams::racing: all other streams get as far as they can without waiting.
void let_others_race(CUstream_st& stream) {
  const auto ready = [](const Step& step) { return !step.after || step.after->reached >= step.recording; };
  static bool racing = false;
  if (racing || simt::options().streams != simt::Streams::racing) return;
  racing = true;
  for (cudaStream_t s : streams)
    while (s != &stream && !s->queue.empty() && ready(s->queue.front())) run_first(*s);
  racing = false;
}

void run_first(CUstream_st& stream) {
  let_others_race(stream);
  const Step step = std::move(stream.queue.front());
  stream.queue.pop_front();
  if (step.after) run_until(step.after, step.recording);
  if (step.work) step.work();
}
void drain(CUstream_st& stream) {
  while (!stream.queue.empty()) run_first(stream);
}
void drain_all() {
  for (cudaStream_t s : streams) drain(*s);
}
void run_until(cudaEvent_t event, unsigned long recording) {
  while (event->reached < recording) {
    if (!event->stream || event->stream->queue.empty()) fail("an event whose recording is in no stream");
    run_first(*event->stream);
  }
}

void enqueue(cudaStream_t stream, Step step) {
  if (!stream) {
    for (cudaStream_t s : streams)
      if (s->capture) fail("work on the null stream while another stream is capturing");
    drain_all();
    if (step.work) step.work();
    return;
  }
  if (stream->capture) {
    stream->capture->steps.push_back(std::move(step));
    return;
  }
  stream->queue.push_back(std::move(step));
  if (simt::options().streams == simt::Streams::eager) drain(*stream);
}

bool pinned(const void* p) {
  const simt::Allocation* a = simt::find_allocation(p);
  return a && a->pinned;
}

void need_range(const char* call, const char* which, const void* p, size_t bytes, bool device) {
  const simt::Allocation* a = simt::find_allocation(p);
  if (device && (!a || a->pinned)) fail("%s: %s is host memory, a device pointer belongs here: %p, %s", call, which, p,
                                        simt::describe_address(p).c_str());
  if (!device && a && !a->pinned) fail("%s: %s is device memory, a host pointer belongs here: %s", call, which,
                                       simt::describe_address(p).c_str());
  if (!a) return;
  if (a->freed) fail("%s: %s was freed: %s", call, which, simt::describe_address(p).c_str());
  const size_t offset = static_cast<size_t>(static_cast<const char*>(p) - a->begin);
  if (bytes > a->bytes - offset)
    fail("%s: %s: %zu bytes from %s", call, which, bytes, simt::describe_address(p).c_str());
}

void check_copy(const char* call, void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (kind == cudaMemcpyDefault) return;
  need_range(call, "destination", to, bytes, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice);
  need_range(call, "source", from, bytes, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice);
}

cudaError_t allocate(void** pointer, size_t bytes, bool host) {
  if (const cudaError_t error = need_device()) return result(error);
  if (!host && bytes > device_bytes() - std::min(device_bytes(), simt::allocated_bytes())) {
    *pointer = nullptr;
    return result(cudaErrorMemoryAllocation);
  }
  static int count = 0;
  *pointer = simt::allocate(bytes, 256, strf("%s #%d", host ? "cudaMallocHost" : "cudaMalloc", ++count).c_str(), host);
  return cudaSuccess;
}
cudaError_t free_memory(void* pointer, bool host, const char* call) {
  if (!pointer) return cudaSuccess;
  const simt::Allocation* a = simt::find_allocation(pointer);
  if (a && a->pinned != host) fail("%s of %s", call, simt::describe_address(pointer).c_str());
  drain_all();  // both wait for the device
  simt::release(pointer);
  return cudaSuccess;
}

}  // namespace

namespace simt {

void submit(cudaStream_t stream, std::function<void()> work) {
  need_stream(stream, "launch");
  enqueue(stream, {std::move(work), nullptr, 0});
}

void check_argument(const void* pointer, const char* text) {
  if (!pointer) return;
  const Allocation* a = find_allocation(pointer);
  if (!a && find_allocation(static_cast<const char*>(pointer) - 1)) return;  // one past the end
  if (!a) fail("launch(%s): the argument %p is host memory, a device pointer belongs there", text, pointer);
  if (a->freed) fail("launch(%s): an argument points to freed memory: %s", text, describe_address(pointer).c_str());
}
void check_range(const void* pointer, size_t bytes, const char* call) {
  need_range(call, "a buffer", pointer, bytes, true);
}

}  // namespace simt

// --- Devices and errors ---------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  *count = std::max(0, device_count());
  return result(need_device());
}
cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t error = need_device()) return result(error);
  if (device < 0 || device >= device_count()) return result(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return result(need_device());
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device < 0 || device >= device_count()) return result(cudaErrorInvalidDevice);
  *p = {};
  snprintf(p->name, sizeof p->name, "emulated GPU");
  p->totalGlobalMem = device_bytes();
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = 227 << 10;
  p->major = 9;
  p->multiProcessorCount = 4;
  p->maxThreadsPerBlock = simt::max_threads;
  p->pciBusID = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (const cudaError_t error = cudaGetDeviceProperties(&p, device)) return error;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(p.sharedMemPerBlockOptin); break;
    default: return result(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = device_count() < 0 ? 0 : 13000;  // 0: no driver
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = device_bytes();
  *free = *total - std::min(*total, simt::allocated_bytes());
  return result(need_device());
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
  }
  return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

// --- Memory ---------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, size_t bytes) { return allocate(pointer, bytes, false); }
cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return allocate(pointer, bytes, true); }
cudaError_t cudaFree(void* pointer) { return free_memory(pointer, false, "cudaFree"); }
cudaError_t cudaFreeHost(void* pointer) { return free_memory(pointer, true, "cudaFreeHost"); }

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  need_stream(stream, "cudaMemcpyAsync");
  if (bytes == 0) return cudaSuccess;
  check_copy("cudaMemcpyAsync", to, from, bytes, kind);
  // Pageable memory: a copy to the device has read it, a copy from the device has written it, when the call returns.
  if (kind == cudaMemcpyHostToDevice && !pinned(from) && !(stream && stream->capture)) {
    const auto* bytes_from = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(bytes_from, bytes_from + bytes);
    enqueue(stream, {[=] { memcpy(to, staged->data(), bytes); }, nullptr, 0});
    return cudaSuccess;
  }
  enqueue(stream, {[=] {
    check_copy("cudaMemcpyAsync, when it came to run", to, from, bytes, kind);
    memmove(to, from, bytes);
  }, nullptr, 0});
  if (kind == cudaMemcpyDeviceToHost && !pinned(to) && stream && !stream->capture) drain(*stream);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  need_stream(stream, "cudaMemsetAsync");
  if (bytes == 0) return cudaSuccess;
  need_range("cudaMemsetAsync", "destination", to, bytes, true);
  enqueue(stream, {[=] {
    need_range("cudaMemsetAsync, when it came to run", "destination", to, bytes, true);
    memset(to, value, bytes);
  }, nullptr, 0});
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }

// --- Streams and events ---------------------------------------------------------------------------------------------

cudaError_t cudaDeviceSynchronize() {
  if (const cudaError_t error = need_device()) return result(error);
  for (cudaStream_t s : streams)
    if (s->capture) return result(cudaErrorStreamCaptureUnsupported);
  drain_all();
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  if (const cudaError_t error = need_device()) return result(error);
  streams.insert(*stream = new CUstream_st);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  need_stream(stream, "cudaStreamDestroy");
  drain(*stream);
  for (cudaEvent_t e : events)
    if (e->stream == stream) e->stream = nullptr;
  streams.erase(stream);
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  need_stream(stream, "cudaStreamSynchronize");
  if (stream && stream->capture) return result(cudaErrorStreamCaptureUnsupported);
  stream ? drain(*stream) : drain_all();
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  need_stream(stream, "cudaStreamQuery");
  return !stream || stream->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  need_stream(stream, "cudaStreamWaitEvent");
  need_event(event, "cudaStreamWaitEvent");
  if (event->capture) {
    if (!stream || (stream->capture && stream->capture != event->capture))
      fail("cudaStreamWaitEvent: the event belongs to another capture");
    stream->capture = event->capture;  // the stream joins; a graph runs in the order of its capture
    return cudaSuccess;
  }
  if (stream && stream->capture) return result(cudaErrorStreamCaptureUnsupported);
  if (event->recorded > 0) enqueue(stream, {nullptr, event, event->recorded});
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (const cudaError_t error = need_device()) return result(error);
  events.insert(*event = new CUevent_st);
  (*event)->timing = !(flags & cudaEventDisableTiming);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  need_event(event, "cudaEventDestroy");
  if (event->reached < event->recorded) run_until(event, event->recorded);
  events.erase(event);
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  need_stream(stream, "cudaEventRecord");
  need_event(event, "cudaEventRecord");
  event->capture = stream ? stream->capture : nullptr;
  if (event->capture) return cudaSuccess;
  if (event->reached < event->recorded && event->stream != stream) run_until(event, event->recorded);
  event->stream = stream;
  const unsigned long recording = ++event->recorded;
  enqueue(stream, {[=] { event->reached = recording, event->time = Clock::now(); }, nullptr, 0});
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  need_event(event, "cudaEventSynchronize");
  if (event->capture) return result(cudaErrorStreamCaptureUnsupported);
  run_until(event, event->recorded);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  need_event(event, "cudaEventQuery");
  return event->reached >= event->recorded ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  need_event(start, "cudaEventElapsedTime");
  need_event(end, "cudaEventElapsedTime");
  if (!start->timing || !end->timing || !start->recorded || !end->recorded) return result(cudaErrorInvalidValue);
  if (start->reached < start->recorded || end->reached < end->recorded) return result(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
  return cudaSuccess;
}

// --- Graphs ---------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  need_stream(stream, "cudaStreamBeginCapture");
  if (!stream || stream->capture) return result(cudaErrorStreamCaptureUnsupported);
  stream->capture = new CUgraph_st;
  stream->origin = true;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  need_stream(stream, "cudaStreamEndCapture");
  if (!stream || !stream->capture || !stream->origin) return result(cudaErrorInvalidValue);
  *graph = stream->capture;
  for (cudaStream_t s : streams)
    if (s->capture == *graph) s->capture = nullptr, s->origin = false;
  for (cudaEvent_t e : events)
    if (e->capture == *graph) e->capture = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new CUgraphExec_st{graph->steps};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  need_stream(stream, "cudaGraphLaunch");
  for (const Step& step : exec->steps) enqueue(stream, step);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
