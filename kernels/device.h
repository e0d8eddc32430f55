// The device that the layers run on: its memory by class, its threads, and the profile of its operations.
//
// Every entry point of a layer takes a Device& last. All memory comes from it, so that its table by class is the truth.
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

#include "runtime/error.h"

enum class Memory { weights, gradients, states, activations, workspace };
inline constexpr std::array memory_names = {"weights", "gradients", "states", "activations", "workspace"};

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
  // threads: CPU threads, 0 = all that this process may use.
  explicit Device(int threads = 0) { set_threads(threads > 0 ? threads : omp_get_max_threads()); }
  Device(const Device&) = delete;

  int threads() const { return threads_; }
  void set_threads(int threads) {
    threads_ = threads;
    omp_set_num_threads(threads);
    if (scratch_.size() < static_cast<size_t>(threads)) scratch_.resize(static_cast<size_t>(threads));
  }
  int64_t bytes(Memory memory) const { return bytes_[static_cast<size_t>(memory)]; }
  int64_t bytes() const {
    int64_t sum = 0;
    for (const int64_t b : bytes_) sum += b;
    return sum;
  }

  // n uninitialised elements for the calling thread of a parallel region, in slot 0, 1, ... (a slot a purpose). Valid
  // until the thread asks for the slot again. Grows as needed and counts as workspace.
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

  Profile profile;

 private:
  template <class T>
  friend class Buffer;
  static constexpr size_t huge_page = size_t{2} << 20;

  // Cache-line aligned; on huge pages where it pays, since AdamW walks seven arrays at once.
  void* allocate(Memory memory, size_t bytes) {
    const size_t align = bytes >= huge_page ? huge_page : 64;
    void* p = std::aligned_alloc(align, (bytes + align - 1) / align * align);
    if (!p)
      RUN_ERROR("out of memory: %.1f MiB for %s; use a smaller --batch-size or --model", bytes / 0x1p20,
                memory_names[static_cast<size_t>(memory)]);
#ifdef MADV_HUGEPAGE
    if (align == huge_page) madvise(p, bytes, MADV_HUGEPAGE);
#endif
    memset(p, 0, bytes);
    std::lock_guard lock(mutex_);
    bytes_[static_cast<size_t>(memory)] += static_cast<int64_t>(bytes);
    return p;
  }
  void release(Memory memory, void* p, size_t bytes) {
    std::free(p);
    std::lock_guard lock(mutex_);
    bytes_[static_cast<size_t>(memory)] -= static_cast<int64_t>(bytes);
  }

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

// Marks an operation: its time goes into the device's profile.
class Scope {
 public:
  Scope(const char* operation, Device& device) : operation_(operation), device_(device) {}
  ~Scope() { device_.profile.add(operation_, std::chrono::duration<double>(clock::now() - start_).count()); }

 private:
  using clock = std::chrono::steady_clock;
  const char* operation_;
  Device& device_;
  clock::time_point start_ = clock::now();
};
