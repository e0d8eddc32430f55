// Dense matrix-product peaks of known GPUs, from their vendor's data sheets: what MFU is measured against.
#pragma once
#include <cstring>

// FLOP/s with fp32 sums: bf16 operands on tensor cores, or fp32 on the plain cores. 0 for an unknown GPU, for which no
// MFU is printed.
inline double gpu_peak_flops(const char* name, bool in_bf16) {
  struct Gpu {
    const char* name;
    double bf16, fp32;  // TFLOP/s
  };
  // The first that is part of the name. The SXM boards; PCIe ones are slower and named.
  static constexpr Gpu gpus[] = {{"H100 PCIe", 756, 51},  {"H100 NVL", 835, 60},  {"H200", 989, 67},
                                 {"H100", 989, 67},       {"GH200", 989, 67},     {"B200", 2250, 80},
                                 {"A100", 312, 19.5},     {"A800", 312, 19.5},    {"L40S", 362, 91.6},
                                 {"L40", 181, 90.5},      {"A40", 150, 37.4},     {"A10G", 70, 35},
                                 {"A10", 125, 31.2},      {"L4", 121, 30.3},      {"RTX 5090", 210, 105},
                                 {"RTX 4090", 165, 82.6}, {"RTX 3090", 71, 35.6}, {"RTX A6000", 155, 38.7}};
  for (const Gpu& gpu : gpus)
    if (strstr(name, gpu.name)) return (in_bf16 ? gpu.bf16 : gpu.fp32) * 1e12;
  return 0;
}
