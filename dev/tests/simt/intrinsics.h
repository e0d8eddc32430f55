// CUDA's intrinsics and portable.cuh's PTX wrappers, emulated. Included by portable.cuh only.
//
// Each takes its call site as a hidden last argument. Every access that an instruction makes to memory is made here, by
// the fiber that it belongs to, and not in the runtime: so sanitizers see it, with the kernel's line one frame up. The
// runtime only moves register contents and addresses between lanes.
#pragma once
#include <type_traits>

#include "dev/tests/simt/cuda_runtime.h"
#include "dev/tests/simt/simt.h"
#include "dev/tests/simt/streams.h"

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

#define SHARED(type, name, extent)                                                              \
  using name##_type = type extent;                                                              \
  static_assert(alignof(name##_type) <= 16);                                                    \
  static char name##_key;                                                                       \
  auto& name = *static_cast<name##_type*>(simt::shared_static(&name##_key, sizeof(name##_type), #name))
#define SHARED_DYNAMIC(type, name) type* const name = static_cast<type*>(simt::shared_dynamic())

template <class... P, class... A>
void launch_kernel(LaunchSite site, void (*kernel)(P...), dim3 grid, dim3 block, size_t dynamic_bytes,
                   cudaStream_t stream, A&&... arguments) {
  simt::Call<void (*)(P...), std::tuple<P...>> call{kernel, {static_cast<P>(arguments)...}};
  const auto check = [&](const auto& argument) {
    if constexpr (std::is_pointer_v<std::remove_cvref_t<decltype(argument)>>) simt::check_argument(argument, site.text);
  };
  std::apply([&](const auto&... argument) { (check(argument), ...); }, call.arguments);
  simt::submit(stream, [=]() mutable {
    simt::run_grid({grid, block, dynamic_bytes, site.file, site.line, site.text}, decltype(call)::thread, &call);
  });
}
#define launch(...) launch_kernel(LaunchSite{__FILE__, __LINE__, #__VA_ARGS__}, __VA_ARGS__)

inline void __syncthreads(simt::Site site = simt::Site::current()) {
  if (!simt::dropped(site, "__syncthreads")) simt::block_barrier(site);
}
inline void __syncwarp(unsigned mask = all_lanes, simt::Site site = simt::Site::current()) {
  if (simt::dropped(site, "__syncwarp")) return;
  simt::Collective call{simt::Op::sync, "__syncwarp", mask, nullptr, nullptr};
  call.site = site;
  simt::warp_collective(call);
}
// Only orders this thread's accesses; one thread at a time runs here, so there is nothing to do.
inline void __threadfence() {}

// Shuffles, votes and reductions wait for the warp's lanes and order no memory (CUDA programming guide, "Warp shuffle
// functions"), so they are no substitute for __syncwarp: a race detector must not take them for one.
namespace simt {
template <class T>
T shuffle(Op op, const char* name, unsigned mask, T value, int argument, int width, Site site) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "CUDA shuffles 4 and 8 byte numbers");
  T result{};
  Collective call{op, name, mask, &value, &result, sizeof(T), argument, width};
  call.site = site;
  warp_collective(call);
  return result;
}
inline unsigned vote(Op op, const char* name, unsigned mask, int predicate, Site site) {
  unsigned result = 0;
  Collective call{op, name, mask, &predicate, &result};
  call.site = site;
  warp_collective(call);
  return result;
}
template <class T>
T reduce(Op op, const char* name, unsigned mask, T value, Site site) {
  static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned>, "CUDA reduces int and unsigned");
  T result{};
  Collective call{op, name, mask, &value, &result};
  call.number = std::is_same_v<T, int> ? Number::i32 : Number::u32;
  call.site = site;
  warp_collective(call);
  return result;
}
}  // namespace simt

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, simt::Site site = simt::Site::current()) {
  return simt::shuffle(simt::Op::shfl, "__shfl_sync", mask, value, lane, width, site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, simt::Site site = simt::Site::current()) {
  return simt::shuffle(simt::Op::shfl_xor, "__shfl_xor_sync", mask, value, lane_mask, width, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, simt::Site site = simt::Site::current()) {
  return simt::shuffle(simt::Op::shfl_up, "__shfl_up_sync", mask, value, static_cast<int>(delta), width, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, simt::Site site = simt::Site::current()) {
  return simt::shuffle(simt::Op::shfl_down, "__shfl_down_sync", mask, value, static_cast<int>(delta), width, site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, simt::Site site = simt::Site::current()) {
  return simt::vote(simt::Op::ballot, "__ballot_sync", mask, predicate, site);
}
inline int __any_sync(unsigned mask, int predicate, simt::Site site = simt::Site::current()) {
  return static_cast<int>(simt::vote(simt::Op::any, "__any_sync", mask, predicate, site));
}
inline int __all_sync(unsigned mask, int predicate, simt::Site site = simt::Site::current()) {
  return static_cast<int>(simt::vote(simt::Op::all, "__all_sync", mask, predicate, site));
}
template <class T>
T __reduce_add_sync(unsigned mask, T value, simt::Site site = simt::Site::current()) {
  return simt::reduce(simt::Op::add, "__reduce_add_sync", mask, value, site);
}
template <class T>
T __reduce_min_sync(unsigned mask, T value, simt::Site site = simt::Site::current()) {
  return simt::reduce(simt::Op::min, "__reduce_min_sync", mask, value, site);
}
template <class T>
T __reduce_max_sync(unsigned mask, T value, simt::Site site = simt::Site::current()) {
  return simt::reduce(simt::Op::max, "__reduce_max_sync", mask, value, site);
}

// Integers only: a sum of floats in whatever order threads arrive is not reproducible, so it must not compile.
template <class T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>);
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
template <class T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>);
  T old = __atomic_load_n(address, __ATOMIC_ACQUIRE);
  while (old < value && !__atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
  }
  return old;
}

inline shared_address to_shared(const void* pointer, simt::Site site = simt::Site::current()) {
  return simt::shared_offset(pointer, site);
}

namespace simt {
// Memory as an instruction sees it, whatever type the kernel stored there.
using any_u16 [[gnu::may_alias]] = uint16_t;
using any_u32 [[gnu::may_alias]] = uint32_t;
using any_u64 [[gnu::may_alias]] = uint64_t;

// PTX "ldmatrix": lanes exchange addresses, then each reads the words that it receives. Reading only its own row, or
// all rows in one lane, would hide a missing barrier between the writer of a row and the lanes that receive it.
template <bool transposed, int tiles>
void ldmatrix(uint32_t (&r)[tiles], shared_address row, const char* name, Site site) {
  const TileRow in{row, transposed};
  TileAddresses out;
  Collective call{Op::ldmatrix, name, all_lanes, &in, &out};
  call.argument = tiles;
  call.site = site;
  warp_collective(call);
  for (int m = 0; m < tiles; m++) {
    if constexpr (transposed)
      r[m] = *static_cast<const any_u16*>(out.at[2 * m]) |
             static_cast<uint32_t>(*static_cast<const any_u16*>(out.at[2 * m + 1])) << 16;
    else
      r[m] = *static_cast<const any_u32*>(out.at[m]);
  }
}

inline void copy_async(const AsyncCopy& copy) {
  auto* to = static_cast<any_u64*>(copy.destination);
  if (copy.bytes == 16) {
    auto* from = static_cast<const any_u64*>(copy.source);
    to[0] = from[0];
    to[1] = from[1];
    return;
  }
  to[0] = to[1] = 0;
  for (int i = 0; i < copy.bytes; i++)
    static_cast<unsigned char*>(copy.destination)[i] = static_cast<const unsigned char*>(copy.source)[i];
}
}  // namespace simt

inline void ldmatrix_x4(uint32_t (&r)[4], shared_address row, simt::Site site = simt::Site::current()) {
  simt::ldmatrix<false>(r, row, "ldmatrix_x4", site);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], shared_address row, simt::Site site = simt::Site::current()) {
  simt::ldmatrix<true>(r, row, "ldmatrix_x4_trans", site);
}
inline void ldmatrix_x2(uint32_t (&r)[2], shared_address row, simt::Site site = simt::Site::current()) {
  simt::ldmatrix<false>(r, row, "ldmatrix_x2", site);
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], shared_address row, simt::Site site = simt::Site::current()) {
  simt::ldmatrix<true>(r, row, "ldmatrix_x2_trans", site);
}

// PTX "mma.sync m16n8k16". The sixteen products are exact in fp32; they are added to c one by one in order of k.
inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                         simt::Site site = simt::Site::current()) {
  const simt::MmaOperands in{{c[0], c[1], c[2], c[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  simt::Collective call{simt::Op::mma, "mma_m16n8k16", all_lanes, &in, &c};
  call.site = site;
  simt::warp_collective(call);
}

// PTX "cp.async": made by the fiber that asked, at issue or at its wait (Options::async).
inline void cp_async_16(shared_address destination, const void* source, int bytes,
                        simt::Site site = simt::Site::current()) {
  void* const to = simt::shared_row(destination, "destination of cp_async_16", site);
  simt::check_aligned(source, 16, "source of cp_async_16", site);
  simt::check_copy_bytes(bytes, site);
  const simt::AsyncCopy copy{to, source, bytes};
  if (simt::async_issue(copy)) {
    simt::copy_async(copy);
  } else {
    const uint64_t poison = simt::options().poison * 0x100000001u;
    static_cast<simt::any_u64*>(to)[0] = static_cast<simt::any_u64*>(to)[1] = poison;
  }
}
inline void cp_async_16(shared_address destination, const void* source, simt::Site site = simt::Site::current()) {
  cp_async_16(destination, source, 16, site);
}
inline void cp_async_commit() { simt::async_commit(); }
template <int N>
void cp_async_wait(simt::Site site = simt::Site::current()) {
  static_assert(N >= 0);
  if (simt::dropped(site, "cp_async_wait")) return;
  simt::AsyncCopy copy;
  while (simt::async_next(N, copy)) simt::copy_async(copy);
}

inline float exp2_approx(float x) { return std::exp2(x); }
