// Shared memory of a block, and the cp.async copies on their way into it.
//
// The arena holds the dynamic array and, as the block's threads come to their declarations, the static ones. Each is
// followed by guard bytes. Arrays start as poison in every block; guards are compared when the block has ended, and
// under AddressSanitizer any access to them is reported at once.
#include <sys/mman.h>

#include "dev/tests/simt/engine.h"

namespace simt {
namespace {

constexpr uint32_t guard_bytes = 256, guard_word = 0x7fadbeef;  // a signalling NaN as well
constexpr uint32_t arena_bytes = 512 << 10;
// What one block may have on an H100: 227 KiB in all, 48 KiB of them static.
constexpr size_t most_shared = 227 << 10, most_static = 48 << 10;

// Never memset or memcpy: ThreadSanitizer intercepts them even here, and would take the filling for an access of the
// thread that happens to run. The words differ from byte to byte, so the loop can't be turned into a memset either.
void fill(char* from, const char* to, uint32_t word) {
  for (int k = 0; from < to; from++, k++) *from = static_cast<char>(word >> 8 * (k % 4));
}
void fill_words(char* from, const char* to, uint32_t word) {
  auto* w = reinterpret_cast<uint64_t*>(from);
  const uint64_t both = word * 0x100000001u;
  for (; reinterpret_cast<const char*>(w + 1) <= to; w++) *w = both;
  fill(reinterpret_cast<char*>(w), to, word);
}

// Appends an array that starts at `begin`, between its guards.
void add_array(Arena& arena, uint32_t begin, size_t bytes, const void* key, const char* name) {
  const uint32_t end = begin + static_cast<uint32_t>(bytes);
  asan_allow(arena.base + begin, bytes);
  fill_words(arena.base + begin, arena.base + end, options().poison);
  fill(arena.base + end, arena.base + end + guard_bytes, guard_word);
  asan_forbid(arena.base + end, guard_bytes);
  arena.arrays.push_back({begin, end, key, name});
  arena.used = end + guard_bytes;
}

}  // namespace

void open_arena(Arena& arena, size_t dynamic_bytes) {
  if (!arena.base) {
    // The base is aligned to a page, so that address bits used by swizzles mean what they mean on a GPU.
    void* map = mmap(nullptr, arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    arena.base = static_cast<char*>(map);
    if (map == MAP_FAILED) fail("no memory for the emulated shared memory");
  }
  if (dynamic_bytes > most_shared)
    fail("%zu bytes of dynamic shared memory; a block has at most %zu", dynamic_bytes, most_shared);
  arena.arrays.clear();
  // 128-byte aligned and no more, as SHARED_DYNAMIC promises.
  const uint32_t begin = 1024 + 128;
  asan_allow(arena.base, arena_bytes);
  fill(arena.base + begin - guard_bytes, arena.base + begin, guard_word);
  asan_forbid(arena.base, begin);
  asan_forbid(arena.base + begin, arena_bytes - begin);
  add_array(arena, begin, dynamic_bytes, nullptr, "dynamic shared memory");
}

void check_arena(const Arena& arena) {
  if (!arena.base) return;
  const Array* before = nullptr;
  asan_allow(arena.base, arena.used);
  for (const Array& array : arena.arrays) {
    if (!before)
      for (uint32_t i = 0; i < guard_bytes; i++)
        if (arena.base[array.begin - guard_bytes + i] != static_cast<char>(guard_word >> 8 * (i % 4)))
          fail("write before shared memory, %u bytes before `%s`", guard_bytes - i, array.name);
    for (uint32_t i = 0; i < guard_bytes; i++)
      if (arena.base[array.end + i] != static_cast<char>(guard_word >> 8 * (i % 4)))
        fail("write past shared memory: byte %u of `%s`, which has %u bytes", array.end - array.begin + i, array.name,
             array.end - array.begin);
    before = &array;
  }
}

void* shared_dynamic() {
  const Arena& arena = engine.lineage->arena;
  return arena.base + arena.arrays[0].begin;
}

void* shared_static(const void* key, size_t bytes, const char* name) {
  Arena& arena = engine.lineage->arena;
  for (const Array& array : arena.arrays)
    if (array.key == key) return arena.base + array.begin;
  // 16-byte aligned and no more, as SHARED promises.
  const uint32_t begin = (arena.used + 31) / 32 * 32 + 16;
  add_array(arena, begin, bytes, key, name);
  size_t all = 0;
  for (const Array& array : arena.arrays) all += array.end - array.begin;
  const size_t fixed = all - (arena.arrays[0].end - arena.arrays[0].begin);
  if (fixed > most_static || all > most_shared)
    fail("%zu bytes of static and %zu of all shared memory with `%s`; a block has at most %zu and %zu", fixed, all,
         name, most_static, most_shared);
  return arena.base + begin;
}

uint32_t shared_offset(const void* pointer, Site site) {
  const Arena& arena = engine.lineage->arena;
  const char* p = static_cast<const char*>(pointer);
  if (p < arena.base || p >= arena.base + arena.used)
    fail("to_shared at %s: %p is no address in shared memory", place(site).c_str(), pointer);
  return static_cast<uint32_t>(p - arena.base);
}

void* shared_row(uint32_t address, const char* what, Site site) {
  const Arena& arena = engine.lineage->arena;
  if (address % 16 != 0)
    fail("misaligned: %s at %s: shared address %#x is not a multiple of 16", what, place(site).c_str(), address);
  for (const Array& array : arena.arrays)
    if (address >= array.begin && address + 16 <= array.end) return arena.base + address;
  for (const Array& array : arena.arrays)
    if (address + 16 > array.begin && address < array.end + guard_bytes)
      fail("outside of shared memory: %s at %s: the 16 bytes from byte %lld of `%s`, which has %u", what,
           place(site).c_str(), static_cast<long long>(address) - array.begin, array.name, array.end - array.begin);
  fail("outside of shared memory: %s at %s: shared address %#x", what, place(site).c_str(), address);
}

void check_aligned(const void* pointer, size_t alignment, const char* what, Site site) {
  if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0)
    fail("misaligned: %s at %s: %p is not a multiple of %zu", what, place(site).c_str(), pointer, alignment);
}

void check_copy_bytes(int bytes, Site site) {
  if (bytes < 0 || bytes > 16) fail("cp_async_16 at %s: %d bytes, not 0 to 16", place(site).c_str(), bytes);
}

bool async_issue(const AsyncCopy& copy) {
  const Async when = options().async;
  if (when == Async::at_issue || (when == Async::random && next_random() % 2)) return true;
  engine.current->queue.copies.push_back(copy);
  return false;
}

void async_commit() {
  CopyQueue& q = engine.current->queue;
  if (!q.copies.empty()) q.group_ends.push_back({q.copies.size()});  // groups before the first copy wait for nothing
}

bool async_next(int newest, AsyncCopy& copy) {
  CopyQueue& q = engine.current->queue;
  while (q.group_ends.size() - q.groups_made > static_cast<size_t>(newest)) {
    if (q.made < q.group_ends[q.groups_made].copies) {
      copy = q.copies[q.made++];
      return true;
    }
    q.groups_made++;
  }
  if (q.made == q.copies.size()) q.clear();
  return false;
}

}  // namespace simt
