#include "dev/tests/simt/memory.h"

#include <algorithm>
#include <csignal>
#include <sys/mman.h>
#include <unistd.h>

#include "dev/tests/simt/engine.h"

namespace simt {
namespace {

constexpr size_t guard_bytes = 256;  // looked at on each side; behind, as many as fit before the page ends
constexpr unsigned char guard_byte = 0xa5;
// Freed memory beyond this is given back; its addresses may then be used again.
constexpr size_t most_freed = size_t{256} << 20;

// Not freed at exit: buffers with static storage duration may outlive it.
std::vector<Allocation>& allocations() {
  static auto* all = new std::vector<Allocation>;
  return *all;
}

size_t page_size() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}
size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

char* last_byte(const Allocation& a) { return a.map + a.map_bytes - page_size(); }  // one past what may be touched

void check(const Allocation& a) {
  asan_allow(a.begin - guard_bytes, guard_bytes);
  asan_allow(a.begin + a.bytes, static_cast<size_t>(last_byte(a) - (a.begin + a.bytes)));
  for (size_t i = 1; i <= guard_bytes; i++)
    if (static_cast<unsigned char>(a.begin[-static_cast<ptrdiff_t>(i)]) != guard_byte)
      fail("write %zu bytes before `%s`", i, a.name.c_str());
  for (char* p = a.begin + a.bytes; p < last_byte(a); p++)
    if (static_cast<unsigned char>(*p) != guard_byte)
      fail("write past `%s`: byte %td of %zu", a.name.c_str(), p - a.begin, a.bytes);
}

Allocation* live(const void* pointer) {
  for (Allocation& a : allocations())
    if (a.begin == pointer && !a.freed) return &a;
  return nullptr;
}

void on_fault(int signal, siginfo_t* info, void*) {
  if (!engine.current) {  // not ours
    ::signal(signal, SIG_DFL);
    raise(signal);
    return;
  }
  const char* p = static_cast<const char*>(info->si_addr);
  const Fiber& fiber = *engine.current->fiber;
  if (p < fiber.stack && p >= fiber.stack - page_size()) fail("a CUDA thread's stack overflowed");
  fail("memory fault at %p: %s", info->si_addr, describe_address(info->si_addr).c_str());
}

}  // namespace

void* allocate(size_t bytes, size_t alignment, const char* name, bool pinned) {
  const size_t page = page_size();
  const size_t inner = round_up(guard_bytes + bytes + alignment, page);
  auto* map = static_cast<char*>(mmap(nullptr, inner + page, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (map == MAP_FAILED || mprotect(map + inner, page, PROT_NONE) != 0)
    fail("no memory for `%s` (%zu bytes)", name, bytes);
  char* end = map + inner;
  char* begin = end - bytes;
  begin -= reinterpret_cast<uintptr_t>(begin) % alignment;
  // Plain loops and no memset, see engine.h.
  for (char* p = begin - guard_bytes; p < begin; p++) *p = static_cast<char>(guard_byte);
  for (char* p = begin + bytes; p < end; p++) *p = static_cast<char>(guard_byte);
  for (size_t i = 0; i < bytes; i++) begin[i] = static_cast<char>(options().poison >> 8 * (i % 4));
  asan_forbid(begin - guard_bytes, guard_bytes);
  asan_forbid(begin + bytes, static_cast<size_t>(end - (begin + bytes)));
  allocations().push_back({begin, bytes, name, false, pinned, map, inner + page});
  return begin;
}

void release(void* pointer) {
  Allocation* a = live(pointer);
  if (!a) fail("freeing %p, which is no live allocation: %s", pointer, describe_address(pointer).c_str());
  check(*a);
  a->freed = true;
  mprotect(a->map, a->map_bytes, PROT_NONE);
  size_t freed = 0;
  for (const Allocation& b : allocations()) freed += b.freed ? b.map_bytes : 0;
  std::erase_if(allocations(), [&](const Allocation& b) {  // oldest first
    if (!b.freed || freed <= most_freed) return false;
    freed -= b.map_bytes;
    munmap(b.map, b.map_bytes);
    return true;
  });
}

void check_guards(const void* pointer) {
  const Allocation* a = live(pointer);
  if (!a) fail("%p is no live allocation", pointer);
  check(*a);
  asan_forbid(a->begin - guard_bytes, guard_bytes);
  asan_forbid(a->begin + a->bytes, static_cast<size_t>(last_byte(*a) - (a->begin + a->bytes)));
}

const Allocation* find_allocation(const void* address) {
  const char* p = static_cast<const char*>(address);
  for (const Allocation& a : allocations())
    if (p >= a.begin && p < a.begin + std::max<size_t>(a.bytes, 1)) return &a;
  return nullptr;
}

std::string describe_address(const void* address) {
  const char* p = static_cast<const char*>(address);
  for (const Allocation& a : allocations()) {
    if (p < a.map || p >= a.map + a.map_bytes) continue;
    const std::string name = strf("`%s` (%zu bytes)%s", a.name.c_str(), a.bytes, a.freed ? ", which was freed" : "");
    if (p < a.begin) return strf("%td bytes before %s", a.begin - p, name.c_str());
    return strf("byte %td of %s", p - a.begin, name.c_str());
  }
  return "in no device allocation";
}

size_t allocated_bytes() {
  size_t bytes = 0;
  for (const Allocation& a : allocations()) bytes += a.freed || a.pinned ? 0 : a.bytes;
  return bytes;
}

void watch_faults() {
  static thread_local bool done = false;
  if (done || under_asan() || under_tsan()) return;
  done = true;
  // The fault may be a full stack: the handler needs one of its own.
  static thread_local char stack[64 << 10];
  stack_t alternative = {};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof stack;
  sigaltstack(&alternative, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
}

}  // namespace simt
