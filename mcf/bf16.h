// The bf16 storage type and its rounding.
//
// bf16 is the upper half of an fp32 number: 8 exponent bits, 8 significand bits (7 stored). Values are stored as bf16
// and computed with as fp32: a bf16 operation is the fp32 operation followed by rn(). Because 24 >= 2*8 + 2, that
// double rounding is harmless for + - * / and sqrt: the result is the correctly rounded bf16 (Figueroa, "When is double
// rounding innocuous?", 1995), subnormal results included. It does not hold for a fused multiply-add.
//
// A struct around uint16_t and not the compiler's own __bf16, which may keep excess precision across an expression.
#pragma once
#include <bit>
#include <cstdint>

struct bf16 {
  uint16_t bits;
};

// Rounds x to the bf16 grid: to nearest, ties to even, subnormals kept, beyond the largest to infinity, NaN to NaN.
// Integer arithmetic on purpose: AVX512's VCVTNEPS2BF16 flushes subnormals, and this vectorises everywhere.
inline float rn(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  const uint32_t nan = (u | 0x00400000u) & 0xffff0000u;  // quiet, and still a NaN when its low bits are cut
  return std::bit_cast<float>((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

// As rn(), for any x but a NaN with one of its low 16 bits set (0x7fffffff would become -0). Arithmetic on the CPU
// never makes such a NaN from operands that lie on the bf16 grid: x86, Arm and RISC-V either pass an operand's payload
// on or give the default NaN, whose low bits are 0. So the optimizer's long chains of rounded operations need no NaN
// test.
inline float rn_grid(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
}

// Between storage and arithmetic, for the element types that kernels are templates on.
inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
inline void store(float& to, float x) { to = x; }
inline void store(bf16& to, float x) { to.bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(rn(x)) >> 16); }
// As store(), for an x that lies on the grid of the type already: cuts, does not round.
inline void store_grid(float& to, float x) { to = x; }
inline void store_grid(bf16& to, float x) { to.bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16); }
