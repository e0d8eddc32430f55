// Compiled without any sanitizer, in every build: under ThreadSanitizer an instrumented switch would record the
// runtime's own accesses as the kernel's. The sanitizers' functions are weak: absent from a build, they are skipped.
#include "dev/tests/simt/fiber.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <unistd.h>

extern "C" {
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void __tsan_set_fiber_name(void* fiber, const char* name);
[[gnu::weak]] void __tsan_acquire(void* object);
[[gnu::weak]] void __tsan_release(void* object);
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** frames, const void* stack, size_t bytes);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* frames, const void** stack, size_t* bytes);
[[gnu::weak]] void __asan_poison_memory_region(const volatile void* from, size_t bytes);
[[gnu::weak]] void __asan_unpoison_memory_region(const volatile void* from, size_t bytes);

// Saves the callee-saved registers on this stack and its pointer in *save, then takes up the other stack. The
// floating-point environment is not switched: kernels don't change it.
void simt_switch_stack(void** save, void* load);
}

#if defined(__APPLE__)
#define SYMBOL "_simt_switch_stack"
#else
#define SYMBOL "simt_switch_stack"
#endif

#if defined(__x86_64__)
constexpr int saved_words = 6;   // then the return address
constexpr int return_slot = 6;
constexpr int frame_words = 8;   // one more, so that the entry finds the stack as after a call
asm(".text\n.globl " SYMBOL "\n" SYMBOL ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n");
#elif defined(__aarch64__)
constexpr int saved_words = 20;  // x19-x30, d8-d15
constexpr int return_slot = 11;  // x30
constexpr int frame_words = 20;
asm(".text\n.balign 4\n.globl " SYMBOL "\n" SYMBOL ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n");
#else
#error "simt: no stack switch for this processor (there is one for x86-64 and aarch64): write simt_switch_stack"
#endif
static_assert(return_slot <= saved_words && saved_words <= frame_words);

namespace simt {
namespace {

// Sanitizers grow frames. Pages are only taken when touched.
constexpr size_t plain_stack = 128 << 10, sanitizer_stack = 512 << 10;
Fiber* leaving;  // who made the switch in progress

}  // namespace

Fiber* create_fiber(int index) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const bool sanitized = __tsan_create_fiber || __sanitizer_start_switch_fiber;
  const size_t bytes = sanitized ? sanitizer_stack : plain_stack;
  auto* memory = static_cast<char*>(mmap(nullptr, page + bytes, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) {
    perror("simt: no memory for the stack of a CUDA thread");
    abort();
  }
  auto* fiber = new Fiber;
  fiber->stack = memory + page;
  // Were all stacks to end at the same offset in a page, the frames of 256 threads would share 1/64 of the L1 cache.
  fiber->stack_bytes = bytes - static_cast<size_t>(index % 32) * 128;
  if (__tsan_create_fiber) fiber->tsan = __tsan_create_fiber(0);
  return fiber;
}

void prepare_fiber(Fiber& fiber, void (*entry)()) {
  auto* frame = reinterpret_cast<uintptr_t*>(fiber.stack + fiber.stack_bytes) - frame_words;
  for (int i = 0; i < frame_words; i++) frame[i] = 0;  // a zero frame pointer and return address end a backtrace
  frame[return_slot] = reinterpret_cast<uintptr_t>(entry);
  fiber.stack_pointer = frame;
  fiber.asan_frames = nullptr;
}

void adopt_host(Fiber& host) {
  host = Fiber{};
  if (__tsan_get_current_fiber) host.tsan = __tsan_get_current_fiber();
}

void fiber_entered() {
  if (!__sanitizer_finish_switch_fiber) return;
  const void* stack;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
  if (!leaving->stack_bytes) {  // the host: only AddressSanitizer knows its stack
    leaving->stack = static_cast<char*>(const_cast<void*>(stack));
    leaving->stack_bytes = bytes;
  }
}

void switch_fiber(Fiber& from, Fiber& to, bool done) {
  leaving = &from;
  if (__sanitizer_start_switch_fiber)
    __sanitizer_start_switch_fiber(done ? nullptr : &from.asan_frames, to.stack, to.stack_bytes);
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to.tsan, 1);  // 1: the switch itself orders nothing
  simt_switch_stack(&from.stack_pointer, to.stack_pointer);
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(from.asan_frames, nullptr, nullptr);
}

void tsan_release(void* object) {
  if (__tsan_release) __tsan_release(object);
}
void tsan_acquire(void* object) {
  if (__tsan_acquire) __tsan_acquire(object);
}
void tsan_name(Fiber& fiber, const char* name) {
  if (__tsan_set_fiber_name) __tsan_set_fiber_name(fiber.tsan, name);
}
void asan_forbid(const void* from, size_t bytes) {
  if (__asan_poison_memory_region) __asan_poison_memory_region(from, bytes);
}
void asan_allow(const void* from, size_t bytes) {
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(from, bytes);
}

bool under_tsan() { return __tsan_create_fiber != nullptr; }
bool under_asan() { return __asan_poison_memory_region != nullptr; }

}  // namespace simt
