// Known GPUs, from their vendor's data sheets: what MFU is measured against, and what --plan plans for.
#pragma once
#include <cctype>
#include <cstring>

struct Gpu {
  const char* name;
  double bf16, fp32;  // TFLOP/s of dense products with fp32 sums: on tensor cores, and on the plain cores
  double memory_gb;   // 1e9 bytes; some cards report a few per cent more, which the driver's own share takes up
  double tb_s;        // bandwidth of that memory, 1e12 bytes a second
  double peak_flops(bool in_bf16) const { return (in_bf16 ? bf16 : fp32) * 1e12; }
};

// The SXM boards; PCIe ones are slower and named, before those.
inline constexpr Gpu known_gpus[] = {
    {"H100 PCIe", 756, 51, 80, 2.0},     {"H100 NVL", 835, 60, 94, 3.9},     {"H200", 989, 67, 141, 4.8},
    {"GH200", 989, 67, 96, 4.0},         {"H100", 989, 67, 80, 3.35},        {"B200", 2250, 80, 180, 8.0},
    {"A100-40GB", 312, 19.5, 40, 1.555}, {"A100", 312, 19.5, 80, 2.039},     {"A800", 312, 19.5, 80, 2.039},
    {"L40S", 362, 91.6, 48, 0.864},      {"L40", 181, 90.5, 48, 0.864},      {"A40", 150, 37.4, 48, 0.696},
    {"A10G", 70, 35, 24, 0.6},           {"A10", 125, 31.2, 24, 0.6},        {"L4", 121, 30.3, 24, 0.3},
    {"RTX 5090", 210, 105, 32, 1.792},   {"RTX 4090", 165, 82.6, 24, 1.008}, {"RTX 3090", 71, 35.6, 24, 0.936},
    {"RTX A6000", 155, 38.7, 48, 0.768},
};

// FLOP/s of the GPU whose driver reports this name: the first of the table that is part of it, an A40 not of an A4000.
// 0 for an unknown one, for which no MFU is printed.
inline double gpu_peak_flops(const char* device_name, bool in_bf16) {
  for (const Gpu& gpu : known_gpus)
    if (const char* found = strstr(device_name, gpu.name); found && !isalnum(found[strlen(gpu.name)]))
      return gpu.peak_flops(in_bf16);
  return 0;
}
