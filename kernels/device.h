// The device that the layers run on, the CPU or one GPU: its memory by class, its stream or threads, and the profile of
// its operations.
//
// Every entry point of a layer takes a Device& last. All memory comes from it, so that its table by class is the truth.
// On a GPU everything is issued on one stream; the host waits only where it reads a result.
#pragma once
#include <omp.h>
#include <sys/mman.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/blocks.h"
#include "kernels/portable.cuh"
#include "runtime/error.h"

enum class Memory { weights, gradients, states, activations, workspace };
inline constexpr std::array memory_names = {"weights", "gradients", "states", "activations", "workspace"};

enum class DeviceKind { cpu, cuda };

// Throws RunError naming the call where a CUDA call fails.
#define CUDA_CHECK(call)                                                                 \
  do {                                                                                   \
    if (const cudaError_t error_ = (call); error_ != cudaSuccess)                        \
      RUN_ERROR("%s:%d: %s: %s", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
  } while (0)

// Time by operation, in the order of first use.
struct Profile {
  struct Row {
    const char* operation;
    int64_t calls;
    double seconds;
  };
  std::vector<Row> rows;
  void add(const char* operation, double seconds) {
    for (auto& row : rows)
      if (row.operation == operation || !strcmp(row.operation, operation)) {
        row.calls++;
        row.seconds += seconds;
        return;
      }
    rows.push_back({operation, 1, seconds});
  }
};

class Device;

// Owns n elements of a device's memory. Zeroed and resident from the start.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(Device& device, Memory memory, size_t n);
  Buffer(Buffer&& o) noexcept { *this = std::move(o); }
  Buffer& operator=(Buffer&& o) noexcept {
    std::swap(device_, o.device_);
    std::swap(memory_, o.memory_);
    std::swap(data_, o.data_);
    std::swap(n_, o.n_);
    return *this;
  }
  ~Buffer();
  operator T*() const { return data_; }
  T* data() const { return data_; }
  size_t size() const { return n_; }

 private:
  Device* device_ = nullptr;
  Memory memory_{};
  T* data_ = nullptr;
  size_t n_ = 0;
};

class Device {
 public:
  // The CPU. threads: 0 = all that this process may use.
  explicit Device(int threads = 0) { set_threads(threads > 0 ? threads : omp_get_max_threads()); }
  // A GPU. Throws RunError where it can't be used.
  Device(DeviceKind kind, int gpu, int threads) : Device(threads) {
    kind_ = kind;
    if (kind == DeviceKind::cpu) return;
    CUDA_CHECK(cudaSetDevice(gpu));
    CUDA_CHECK(cudaGetDeviceProperties(&properties_, gpu));
    if (properties_.major < 8)
      RUN_ERROR("GPU %d is a %s of compute capability %d.%d; expected 8.0 or newer (bf16); use --device=cpu", gpu,
                properties_.name, properties_.major, properties_.minor);
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    profiling = false;
  }
  ~Device() {
    scratch_.clear();
    for (const auto& s : staging_) {
      if (s.copied) cudaEventDestroy(s.copied);
      if (s.host) cudaFreeHost(s.host);
    }
    if (stream_) cudaStreamDestroy(stream_);
  }
  Device(const Device&) = delete;

  // How many GPUs can be used. 0: why_not says why, in one line.
  static int gpus(std::string& why_not) {
    int count = 0, driver = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count > 0) return count;
    // A machine without a driver also reports "insufficient driver"; its driver version is 0 then.
    if (error == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0)
      why_not = strf("the NVIDIA driver supports CUDA %d.%d, this build needs a newer one: update the driver",
                     driver / 1000, driver % 1000 / 10);
    else if (error == cudaErrorInsufficientDriver)
      why_not = "no NVIDIA driver on this machine";
    else
      why_not = error == cudaSuccess || error == cudaErrorNoDevice ? "no GPU on this machine" : cudaGetErrorString(error);
    return 0;
  }

  bool is_cuda() const { return kind_ == DeviceKind::cuda; }
  cudaStream_t stream() const { return stream_; }
  const cudaDeviceProp& properties() const { return properties_; }
  // The same for two ranks only if they share a GPU; "" for the CPU.
  std::string id() const {
    if (!is_cuda()) return "";
    return strf("%04x:%02x:%02x", properties_.pciDomainID, properties_.pciBusID, properties_.pciDeviceID);
  }
  int threads() const { return threads_; }
  void set_threads(int threads) {
    threads_ = threads;
    omp_set_num_threads(threads);
    if (scratch_.size() < static_cast<size_t>(threads)) scratch_.resize(static_cast<size_t>(threads));
  }

  // Of a GPU's memory.
  int64_t free_bytes() const {
    size_t free = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return static_cast<int64_t>(free);
  }

  // Waits for all work issued so far; inside a destructor, so errors are left to the next call.
  void synchronize() {
    if (is_cuda()) cudaStreamSynchronize(stream_);
  }
  // Sets n elements to zero bytes.
  template <class T>
  void zero(T* p, size_t n) {
    if (is_cuda()) {
      CUDA_CHECK(cudaMemsetAsync(p, 0, n * sizeof(T), stream_));
      return;
    }
    const size_t bytes = n * sizeof(T);
    char* to = reinterpret_cast<char*>(p);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < bytes; i += piece) memset(to + i, 0, std::min(piece, bytes - i));
  }
  // n elements from host memory to the device, in the order of the stream. The host may change them once upload
  // returns: a GPU gets them from a pinned copy, so that the host waits only if the last four copies are still on their
  // way.
  template <class T>
  void upload(T* to, const T* from, size_t n) {
    if (n == 0) return;
    if (!is_cuda()) return void(memcpy(to, from, n * sizeof(T)));
    const size_t bytes = n * sizeof(T);
    Staging& s = staging_[next_staging_++ % staging_.size()];
    if (!s.copied) CUDA_CHECK(cudaEventCreateWithFlags(&s.copied, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventSynchronize(s.copied));
    if (s.bytes < bytes) {
      if (s.host) CUDA_CHECK(cudaFreeHost(s.host));
      s.host = nullptr, s.bytes = 0;
      CUDA_CHECK(cudaMallocHost(&s.host, bytes));
      s.bytes = bytes;
    }
    memcpy(s.host, from, bytes);
    CUDA_CHECK(cudaMemcpyAsync(to, s.host, bytes, cudaMemcpyHostToDevice, stream_));
    CUDA_CHECK(cudaEventRecord(s.copied, stream_));
  }
  // n elements from the device to host memory. Waits for all work before it.
  template <class T>
  void download(T* to, const T* from, size_t n) {
    if (n == 0) return;
    const size_t bytes = n * sizeof(T);
    if (!is_cuda()) {
      char* out = reinterpret_cast<char*>(to);
#pragma omp parallel for schedule(static) if (bytes > piece)
      for (size_t i = 0; i < bytes; i += piece)
        memcpy(out + i, reinterpret_cast<const char*>(from) + i, std::min(piece, bytes - i));
      return;
    }
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
  }

  int64_t bytes(Memory memory) const { return bytes_[static_cast<size_t>(memory)]; }
  int64_t bytes() const {
    int64_t sum = 0;
    for (const int64_t b : bytes_) sum += b;
    return sum;
  }

  // n uninitialised elements for the calling thread of a parallel region (on a GPU: for the kernels that the host
  // thread launches), in slot 0, 1, ... (a slot a purpose). Valid until the thread asks for the slot again. Grows as
  // needed and counts as workspace.
  template <class T>
  T* scratch(int slot, size_t n) {
    auto& slots = scratch_[static_cast<size_t>(omp_get_thread_num())];
    if (slots.size() <= static_cast<size_t>(slot)) slots.resize(static_cast<size_t>(slot) + 1);
    auto& buffer = slots[static_cast<size_t>(slot)];
    if (buffer.size() < n * sizeof(T)) {
      buffer = Buffer<char>();
      buffer = Buffer<char>(*this, Memory::workspace, n * sizeof(T));
    }
    return reinterpret_cast<T*>(buffer.data());
  }

  // Whether operations are timed. On a GPU each then waits for the one before: the sum is more than a step takes.
  bool profiling = true;
  Profile profile;

 private:
  template <class T>
  friend class Buffer;
  static constexpr size_t huge_page = size_t{2} << 20;
  static constexpr size_t piece = size_t{1} << 20;  // bytes that a thread copies at a time

  void* allocate(Memory memory, size_t bytes) {
    void* p = is_cuda() ? allocate_cuda(memory, bytes) : allocate_cpu(memory, bytes);
    std::lock_guard lock(mutex_);
    bytes_[static_cast<size_t>(memory)] += static_cast<int64_t>(bytes);
    return p;
  }
  void release(Memory memory, void* p, size_t bytes) {
    if (is_cuda())
      cudaFree(p);
    else
      std::free(p);
    std::lock_guard lock(mutex_);
    bytes_[static_cast<size_t>(memory)] -= static_cast<int64_t>(bytes);
  }
  // Cache-line aligned; on huge pages where it pays, since AdamW walks seven arrays at once.
  static void* allocate_cpu(Memory memory, size_t bytes) {
    const size_t align = bytes >= huge_page ? huge_page : 64;
    void* p = std::aligned_alloc(align, (bytes + align - 1) / align * align);
    if (!p)
      RUN_ERROR("out of memory: %.1f MiB for %s; use a smaller --batch-size or --model", bytes / 0x1p20,
                memory_names[static_cast<size_t>(memory)]);
#ifdef MADV_HUGEPAGE
    if (align == huge_page) madvise(p, bytes, MADV_HUGEPAGE);
#endif
    memset(p, 0, bytes);
    return p;
  }
  void* allocate_cuda(Memory memory, size_t bytes) {
    void* p = nullptr;
    const cudaError_t error = cudaMalloc(&p, bytes);
    if (error == cudaErrorMemoryAllocation) {
      size_t free = 0, total = 0;
      CUDA_CHECK(cudaMemGetInfo(&free, &total));
      RUN_ERROR("out of GPU memory: %.1f MiB for %s, %.1f of %.1f MiB are free; use a smaller --batch-size or --model",
                bytes / 0x1p20, memory_names[static_cast<size_t>(memory)], free / 0x1p20, total / 0x1p20);
    }
    CUDA_CHECK(error);
    CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, stream_));
    return p;
  }

  struct Staging {
    void* host = nullptr;
    size_t bytes = 0;
    cudaEvent_t copied = nullptr;
  };
  std::array<Staging, 4> staging_;
  size_t next_staging_ = 0;
  DeviceKind kind_ = DeviceKind::cpu;
  cudaStream_t stream_ = nullptr;
  cudaDeviceProp properties_{};
  int threads_ = 1;
  std::mutex mutex_;
  std::array<int64_t, memory_names.size()> bytes_{};
  std::vector<std::vector<Buffer<char>>> scratch_;  // [thread][slot]
};

template <class T>
Buffer<T>::Buffer(Device& device, Memory memory, size_t n) : device_(&device), memory_(memory), n_(n) {
  if (n) data_ = static_cast<T*>(device.allocate(memory, n * sizeof(T)));
}
template <class T>
Buffer<T>::~Buffer() {
  if (data_) device_->release(memory_, data_, n_ * sizeof(T));
}

// Marks an operation: for NVIDIA's profilers, and its time for the device's own profile.
class Scope {
 public:
  Scope(const char* operation, Device& device) : operation_(operation), device_(device) {
    range_push(operation);
    if (!device.profiling) return;
    device.synchronize();
    start_ = clock::now();
  }
  ~Scope() {
    range_pop();
    if (!device_.profiling) return;
    device_.synchronize();
    device_.profile.add(operation_, std::chrono::duration<double>(clock::now() - start_).count());
  }

 private:
  using clock = std::chrono::steady_clock;
  const char* operation_;
  Device& device_;
  clock::time_point start_;
};

// Time between start() and stop() on the device: on a GPU between two events on its stream.
class Stopwatch {
 public:
  explicit Stopwatch(Device& device) : device_(device) {
    if (!device.is_cuda()) return;
    for (auto& event : events_) CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDefault));
  }
  ~Stopwatch() {
    for (const auto event : events_)
      if (event) cudaEventDestroy(event);
  }
  Stopwatch(const Stopwatch&) = delete;
  void start() { mark(0); }
  void stop() { mark(1); }
  // Milliseconds. Waits for the work before stop().
  double ms() const {
    if (!device_.is_cuda()) return std::chrono::duration<double, std::milli>(times_[1] - times_[0]).count();
    float milliseconds = 0;
    CUDA_CHECK(cudaEventSynchronize(events_[1]));
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, events_[0], events_[1]));
    return milliseconds;
  }

 private:
  void mark(size_t i) {
    if (device_.is_cuda())
      CUDA_CHECK(cudaEventRecord(events_[i], device_.stream()));
    else
      times_[i] = std::chrono::steady_clock::now();
  }
  Device& device_;
  std::array<cudaEvent_t, 2> events_{};
  std::array<std::chrono::steady_clock::time_point, 2> times_;
};

// The blocks of a flat buffer, where the host and where the device reads them.
struct BlockList {
  std::vector<Block> host;
  Buffer<Block> device;
  BlockList(std::vector<Block> blocks, Device& d) : host(std::move(blocks)), device(d, Memory::workspace, host.size()) {
    d.upload(device.data(), host.data(), host.size());
  }
};
