// What a kernel file needs from CUDA, for each of the three ways in which it is compiled. No other file includes a CUDA
// header, holds inline PTX or asks for __CUDA_ARCH__, and no layer file needs an #if.
//
//   __CUDACC__   nvcc: the real thing.
//   SIMT         tests: every CUDA thread is a fiber on the CPU (dev/tests/simt), with emulated twins of the PTX below.
//   neither      the CPU program: kernels are parsed and never instantiated; a launch is an error. What would need a
//                GPU is declared and not defined, so a use that slips through fails at link time.
//
// Rules for layer files, so that one source serves all three:
//   - a kernel is a template, written `template <...> __global__ void name(...)`, without `static` or `inline`;
//   - launch(kernel<...>, grid, block, dynamic_bytes, stream, args...) starts it: a macro, so that the message of a
//     failed launch names the place, and so that the CPU program never instantiates a kernel;
//   - SHARED(float, tile, [32][33]) declares static shared memory; SHARED_DYNAMIC(char, smem) a pointer to the dynamic
//     part, 128-byte aligned. `extern __shared__` has one type and one name here, as CUDA wants it;
//   - UNROLL before a loop (g++ rejects #pragma unroll under -Wall -Werror);
//   - warp collectives under CUDA's own names, over all lanes that are alive: __shfl_sync, __shfl_xor_sync,
//     __shfl_up_sync, __shfl_down_sync, __ballot_sync, __any_sync, __all_sync, __reduce_{add,min,max}_sync.
//
// "PTX" is the PTX ISA 8.5; its section names stand beside each wrapper.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "runtime/error.h"

// Where a launch stands in the source, and how it reads there.
struct LaunchSite { const char* file; int line; const char* text; };

// A shared-memory address as ldmatrix and cp.async take it: 32 bits, so that a lane's base address is computed once and
// tiles are reached by ADD along rows and XOR along swizzled columns.
using shared_address = uint32_t;

constexpr int warp_size = 32;
constexpr unsigned all_lanes = 0xffffffffu;

// ---------------------------------------------------------------------------------------------------------------------
#if defined(__CUDACC__)

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

// A named range in NVIDIA's profilers.
inline void range_push(const char* name) { nvtxRangePushA(name); }
inline void range_pop() { nvtxRangePop(); }

#define UNROLL _Pragma("unroll")
#define SHARED(type, name, extent) __shared__ __align__(16) type name extent
#define SHARED_DYNAMIC(type, name)                             \
  extern __shared__ __align__(128) unsigned char dynamic_shared[]; \
  type* const name = reinterpret_cast<type*>(dynamic_shared)

// Precondition: the arguments convert to the kernel's parameters. Asks for more than 48 KiB of dynamic shared memory by
// itself. Throws RunError if the launch is refused; errors inside the kernel show at the next synchronisation.
template <class... P, class... A>
void launch_kernel(LaunchSite site, void (*kernel)(P...), dim3 grid, dim3 block, size_t dynamic_bytes,
                   cudaStream_t stream, A&&... args) {
  if (dynamic_bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
        cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(dynamic_bytes));
    if (error != cudaSuccess)
      RUN_ERROR("%s:%d: launch(%s): %zu bytes of dynamic shared memory: %s", site.file, site.line, site.text,
                dynamic_bytes, cudaGetErrorString(error));
  }
  kernel<<<grid, block, dynamic_bytes, stream>>>(static_cast<P>(args)...);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess)
    RUN_ERROR("%s:%d: launch(%s) of %ux%ux%u blocks of %ux%ux%u threads: %s", site.file, site.line, site.text,
              grid.x, grid.y, grid.z, block.x, block.y, block.z, cudaGetErrorString(error));
}
#define launch(...) launch_kernel(LaunchSite{__FILE__, __LINE__, #__VA_ARGS__}, __VA_ARGS__)

// PTX "ldmatrix". Four (two) 8x8 tiles of 16-bit elements. Lane 8m+r gives the address of row r of tile m: 16 bytes,
// 16-byte aligned, in shared memory. Lane t receives in r[m] elements (t/4, 2*(t%4)) and (t/4, 2*(t%4)+1) of tile m;
// with _trans those of the transposed tile. All 32 lanes call it together.
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], shared_address row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], shared_address row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
__device__ inline void ldmatrix_x2(uint32_t (&r)[2], shared_address row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"(row) : "memory");
}
__device__ inline void ldmatrix_x2_trans(uint32_t (&r)[2], shared_address row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"(row) : "memory");
}

// PTX "mma.sync m16n8k16", bf16 x bf16 -> fp32: c += a * b, A row-major 16x16, B 16x8 with two k in one register.
// With g = lane/4 and t = lane%4: a[0] (g, 2t..) a[1] (g+8, 2t..) a[2] (g, 2t+8..) a[3] (g+8, 2t+8..);
// b0 (k = 2t.., n = g) b1 (k = 2t+8.., n = g); c[0] (g, 2t) c[1] (g, 2t+1) c[2] (g+8, 2t) c[3] (g+8, 2t+1).
// The order and rounding of the sixteen additions are the hardware's own: never compare them with a twin bit for bit.
__device__ inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// PTX "cp.async", 16 bytes from global to shared memory, L1 bypassed (.cg). Both addresses 16-byte aligned. With
// `bytes` below 16 the rest of the destination is zeroed; at 0 the source is not read (it must still be aligned). The
// data may be read after cp_async_wait by the thread that asked, and after a barrier behind that by others.
__device__ inline void cp_async_16(shared_address destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :: "r"(destination), "l"(__cvta_generic_to_global(source)) : "memory");
}
__device__ inline void cp_async_16(shared_address destination, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(destination), "l"(__cvta_generic_to_global(source)), "r"(bytes) : "memory");
}
// PTX "cp.async.commit_group": closes this thread's group of copies, which may be empty.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// PTX "cp.async.wait_group": until at most N of this thread's newest groups are unfinished.
template <int N>
__device__ inline void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

// The 32-bit address of a pointer into shared memory.
__device__ inline shared_address to_shared(const void* pointer) {
  return static_cast<shared_address>(__cvta_generic_to_shared(pointer));
}

// 2^x for a softmax: not correctly rounded (PTX "ex2.approx" gives the bound), subnormals flushed, 2^-inf = 0. The
// emulated twin is exp2f, so results agree within that bound and not bit for bit.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---------------------------------------------------------------------------------------------------------------------
#else

#if defined(WITH_CUDA) && !defined(SIMT)
// A .cpp file of a program with GPU support, compiled by g++: the same types and runtime calls as in the .cu files, and of
// the kernels no more than the CPU program sees.
#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>
#include <vector_functions.h>
inline void range_push(const char* name) { nvtxRangePushA(name); }
inline void range_pop() { nvtxRangePop(); }
#undef __global__
#undef __device__
#undef __host__
#undef __forceinline__
#undef __launch_bounds__
#undef __align__
#else
#include "kernels/vector_types.h"
inline void range_push(const char*) {}
inline void range_pop() {}
#endif

// `unused` and not [[maybe_unused]]: it may stand anywhere among the specifiers, and both builds have g++ or clang.
#define __global__ __attribute__((unused)) static
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define UNROLL

#if defined(SIMT)
#include "dev/tests/simt/intrinsics.h"
#else
#if !defined(WITH_CUDA)
#include "kernels/no_cuda.h"
#endif

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

#define SHARED(type, name, extent) static type name extent
#define SHARED_DYNAMIC(type, name) type* const name = static_cast<type*>(dynamic_shared())
void* dynamic_shared();

void __syncthreads();
void __syncwarp(unsigned mask = all_lanes);
void __threadfence();
template <class T> T __shfl_sync(unsigned mask, T value, int lane, int width = 32);
template <class T> T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32);
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32);
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32);
unsigned __ballot_sync(unsigned mask, int predicate);
int __any_sync(unsigned mask, int predicate);
int __all_sync(unsigned mask, int predicate);
template <class T> T __reduce_add_sync(unsigned mask, T value);
template <class T> T __reduce_min_sync(unsigned mask, T value);
template <class T> T __reduce_max_sync(unsigned mask, T value);
template <class T> T atomicAdd(T* address, T value);
template <class T> T atomicMax(T* address, T value);

void ldmatrix_x4(uint32_t (&r)[4], shared_address row);
void ldmatrix_x4_trans(uint32_t (&r)[4], shared_address row);
void ldmatrix_x2(uint32_t (&r)[2], shared_address row);
void ldmatrix_x2_trans(uint32_t (&r)[2], shared_address row);
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void cp_async_16(shared_address destination, const void* source);
void cp_async_16(shared_address destination, const void* source, int bytes);
void cp_async_commit();
template <int N> void cp_async_wait();
shared_address to_shared(const void* pointer);
float exp2_approx(float x);

// Never called: the declaration type-checks a launch inside sizeof, which names the kernel without instantiating it.
template <class... P, class... A>
char launch_kernel(void (*kernel)(P...), dim3 grid, dim3 block, size_t dynamic_bytes, cudaStream_t stream, A&&... args);
[[noreturn]] inline void no_gpu_in_this_build(LaunchSite site, size_t) {
  RUN_ERROR("%s:%d: launch(%s): no GPU in this build", site.file, site.line, site.text);
}
#define launch(...) \
  no_gpu_in_this_build(LaunchSite{__FILE__, __LINE__, #__VA_ARGS__}, sizeof(launch_kernel(__VA_ARGS__)))

#endif
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Arithmetic that means the same on host and device: one IEEE operation, rounded to nearest even, that no compiler may
// fuse with its neighbours (nvcc would: --fmad=true is its default). Host code relies on -ffp-contract=off.
#if defined(__CUDA_ARCH__)
#define DEVICE_OR_HOST(device, host) device
#else
#define DEVICE_OR_HOST(device, host) host
#endif
// Which of its two sides a __host__ __device__ function is being compiled for. What it selects must mean the same.
inline constexpr bool device_side = DEVICE_OR_HOST(true, false);
__host__ __device__ inline float add_rn(float a, float b) { return DEVICE_OR_HOST(__fadd_rn(a, b), a + b); }
__host__ __device__ inline float sub_rn(float a, float b) { return DEVICE_OR_HOST(__fsub_rn(a, b), a - b); }
__host__ __device__ inline float mul_rn(float a, float b) { return DEVICE_OR_HOST(__fmul_rn(a, b), a * b); }
__host__ __device__ inline float div_rn(float a, float b) { return DEVICE_OR_HOST(__fdiv_rn(a, b), a / b); }
__host__ __device__ inline float sqrt_rn(float a) { return DEVICE_OR_HOST(__fsqrt_rn(a), std::sqrt(a)); }
__host__ __device__ inline float fma_rn(float a, float b, float c) {
  return DEVICE_OR_HOST(__fmaf_rn(a, b, c), std::fma(a, b, c));
}
#undef DEVICE_OR_HOST

__host__ __device__ inline uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  return __builtin_bit_cast(uint32_t, x);  // memcpy, which takes an address, costs vectorised loops a third of their speed
#endif
}
__host__ __device__ inline float bits_float(uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  return __builtin_bit_cast(float, u);
#endif
}

// bf16 in 16 bits of storage. To bf16: nearest even, NaN becomes 0x7fff (PTX "cvt.rn.bf16.f32"). From bf16: exact.
__host__ __device__ inline uint16_t float_to_bf16_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
  const uint32_t u = float_bits(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
#endif
}
__host__ __device__ inline float bf16_bits_to_float(uint16_t h) { return bits_float(static_cast<uint32_t>(h) << 16); }

// Two floats as a bf16 pair in one register, `low` in the low half: an operand of mma. One cvt instruction on a GPU.
__host__ __device__ inline uint32_t pack_bf16(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
#else
  return float_to_bf16_bits(low) | static_cast<uint32_t>(float_to_bf16_bits(high)) << 16;
#endif
}

// Sixteen bytes of T, moved by one instruction. Precondition of load16 and store16: a 16-byte aligned address. The
// _stream forms tell the caches that the data will not be used again soon (PTX "ld/st cache operators", .cs).
template <class T>
struct alignas(16) Vec16 {
  static constexpr int size = 16 / sizeof(T);
  T v[size];
  __host__ __device__ T& operator[](int i) { return v[i]; }
  __host__ __device__ const T& operator[](int i) const { return v[i]; }
};
#if defined(SIMT) && !defined(__CUDACC__)
#define CALL_SITE , simt::Site site = simt::Site::current()
#define CHECK_ALIGNED_16(pointer) simt::check_aligned(pointer, 16, "16-byte access", site)
#define SAME_SITE , site
#else
#define CALL_SITE
#define CHECK_ALIGNED_16(pointer)
#define SAME_SITE
#endif
template <class T>
__host__ __device__ inline Vec16<T> load16(const T* p CALL_SITE) {
  CHECK_ALIGNED_16(p);
  return *reinterpret_cast<const Vec16<T>*>(p);
}
template <class T>
__host__ __device__ inline void store16(T* p, const Vec16<T>& x CALL_SITE) {
  CHECK_ALIGNED_16(p);
  *reinterpret_cast<Vec16<T>*>(p) = x;
}
template <class T>
__host__ __device__ inline Vec16<T> load16_stream(const T* p CALL_SITE) {
#if defined(__CUDA_ARCH__)
  const int4 raw = __ldcs(reinterpret_cast<const int4*>(p));
  Vec16<T> x;
  memcpy(&x, &raw, sizeof x);
  return x;
#else
  return load16(p SAME_SITE);
#endif
}
template <class T>
__host__ __device__ inline void store16_stream(T* p, const Vec16<T>& x CALL_SITE) {
#if defined(__CUDA_ARCH__)
  int4 raw;
  memcpy(&raw, &x, sizeof raw);
  __stcs(reinterpret_cast<int4*>(p), raw);
#else
  store16(p, x SAME_SITE);
#endif
}
#undef CALL_SITE
#undef CHECK_ALIGNED_16
#undef SAME_SITE
