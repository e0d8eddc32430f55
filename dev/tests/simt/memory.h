// Emulated device memory: allocations that know their owner, start as poison and catch what leaves them.
//
// Each ends as close to an inaccessible page as its alignment allows, so that most accesses past it fault at once,
// reads too; guard bytes in front, and in what is left behind, catch small strays when it is checked or freed. Freed
// memory stays inaccessible. A fault names the allocation and the CUDA thread. Other pages of the process are not
// watched: kernels given host memory by mistake are caught at the launch, which looks at every pointer argument.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "dev/tests/simt/simt.h"

namespace simt {

struct Allocation {
  char* begin;
  size_t bytes;
  std::string name;
  bool freed;
  bool pinned;      // host memory from cudaMallocHost
  char* map;        // pages taken, the last one inaccessible
  size_t map_bytes;
};

// Precondition: alignment a power of two of at least 16 and at most a page. Never returns null; zero bytes are allowed.
void* allocate(size_t bytes, size_t alignment, const char* name, bool pinned = false);
// Checks the guard bytes, aborts if they changed or `pointer` is not the start of a live allocation.
void release(void* pointer);
// Aborts if the guard bytes of this allocation changed.
void check_guards(const void* pointer);
// The allocation that holds the address, freed ones included; null if none does.
const Allocation* find_allocation(const void* address);
// The nearest one, for messages: "`in` (400 bytes), 12 bytes past its end".
std::string describe_address(const void* address);
size_t allocated_bytes();  // of device memory
// Turns SIGSEGV and SIGBUS inside kernels into reports. Does nothing under sanitizers, which have their own.
void watch_faults();

// `count` elements of T for a kernel under test, 16-byte aligned and no more.
template <class T>
class Buffer {
 public:
  explicit Buffer(size_t count, const char* name = "buffer")
      : data_(static_cast<T*>(allocate(count * sizeof(T), 16, name))), size_(count) {}
  explicit Buffer(const std::vector<T>& values, const char* name = "buffer") : Buffer(values.size(), name) {
    for (size_t i = 0; i < size_; i++) data_[i] = values[i];
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { release(data_); }

  T* data() { return data_; }
  size_t size() const { return size_; }
  std::vector<T> values() const { return std::vector<T>(data_, data_ + size_); }
  void check() const { check_guards(data_); }

 private:
  T* data_;
  size_t size_;
};

}  // namespace simt
