// Stackful fibers: a stack with a guard page, a switch of a dozen instructions, and the sanitizers told about both.
#pragma once
#include <cstddef>

namespace simt {

struct Fiber {
  void* stack_pointer = nullptr;  // while it is switched away from
  char* stack = nullptr;          // lowest byte of the stack; null for the host's own stack
  size_t stack_bytes = 0;
  void* asan_frames = nullptr;    // AddressSanitizer's fake stack, kept while switched away from
  void* tsan = nullptr;           // ThreadSanitizer's idea of this fiber
  Fiber* next_free = nullptr;
};

// A fiber with a stack of its own; never freed. `index` staggers the stacks in the cache, see fiber.cpp.
Fiber* create_fiber(int index);
// Makes `fiber` start in entry() when it is next switched to. entry must call fiber_entered() first and never return.
void prepare_fiber(Fiber& fiber, void (*entry)());
// The calling thread's own stack as a fiber to come back to.
void adopt_host(Fiber& host);
// Returns when somebody switches back to `from`; never, if `done`: then only prepare_fiber revives it.
void switch_fiber(Fiber& from, Fiber& to, bool done = false);
void fiber_entered();

// ThreadSanitizer's happens-before edges, and the name a report gives to a fiber; nothing in other builds.
void tsan_release(void* object);
void tsan_acquire(void* object);
void tsan_name(Fiber& fiber, const char* name);
// AddressSanitizer: no access to these bytes / access allowed again; nothing in other builds.
void asan_forbid(const void* from, size_t bytes);
void asan_allow(const void* from, size_t bytes);

}  // namespace simt
