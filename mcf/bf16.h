// The bf16 storage type and its rounding.
//
// bf16 is the upper half of an fp32 number: 8 exponent bits, 8 significand bits (7 stored). Values are stored as bf16
// and computed with as fp32: a bf16 operation is the fp32 operation followed by rn(). Because 24 >= 2*8 + 2, that
// double rounding is harmless for + - * / and sqrt: the result is the correctly rounded bf16 (Figueroa, "When is double
// rounding innocuous?", 1995), subnormal results included. It does not hold for a fused multiply-add.
//
// A struct around uint16_t and not the compiler's own __bf16, which may keep excess precision across an expression.
#pragma once
#include <cstdint>

#include "kernels/portable.cuh"

struct bf16 {
  uint16_t bits;
};

// Rounds x to the bf16 grid: to nearest, ties to even, subnormals kept, beyond the largest to infinity, NaN to NaN.
// On the CPU integer arithmetic on purpose: AVX512's VCVTNEPS2BF16 flushes subnormals, and this vectorises everywhere.
// On a GPU one instruction, since the bf16 pair (x, 0) in one register is the rounded float itself.
__host__ __device__ inline float rn(float x) {
  if constexpr (device_side) return bits_float(pack_bf16(0.0f, x));
  const uint32_t u = float_bits(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  const uint32_t nan = (u | 0x00400000u) & 0xffff0000u;  // quiet, and still a NaN when its low bits are cut
  return bits_float((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

// As rn(), for any x but a NaN with one of its low 16 bits set (0x7fffffff would become -0). Arithmetic on the CPU
// never makes such a NaN from operands that lie on the bf16 grid: x86, Arm and RISC-V either pass an operand's payload
// on or give the default NaN, whose low bits are 0. So the optimizer's long chains of rounded operations need no NaN
// test. A GPU's NaN is 0x7fffffff; its instruction needs no test anyway.
__host__ __device__ inline float rn_grid(float x) {
  if constexpr (device_side) return rn(x);
  const uint32_t u = float_bits(x);
  return bits_float((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
}

// Between storage and arithmetic, for the element types that kernels are templates on. Integers hold what an optimizer
// keeps beside a weight.
__host__ __device__ inline float to_float(float x) { return x; }
__host__ __device__ inline float to_float(int16_t x) { return x; }
__host__ __device__ inline float to_float(int8_t x) { return x; }
__host__ __device__ inline float to_float(bf16 x) { return bf16_bits_to_float(x.bits); }
__host__ __device__ inline void store(float& to, float x) { to = x; }
__host__ __device__ inline void store(bf16& to, float x) { to.bits = static_cast<uint16_t>(float_bits(rn(x)) >> 16); }
// As store(), for an x that lies on the grid of the type already: cuts, does not round.
__host__ __device__ inline void store_grid(float& to, float x) { to = x; }
__host__ __device__ inline void store_grid(bf16& to, float x) { to.bits = static_cast<uint16_t>(float_bits(x) >> 16); }
__host__ __device__ inline void store_grid(int16_t& to, float x) { to = static_cast<int16_t>(x); }
__host__ __device__ inline void store_grid(int8_t& to, float x) { to = static_cast<int8_t>(x); }
