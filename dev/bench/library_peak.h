// What oneDNN reaches by itself: whole products, all threads, no panels. The yardstick of bench_step.
// In a file of its own because the library's C++ header stays out of files that may be compiled as CUDA.
#pragma once
#include <string>
#include <vector>

// A product C (m,n) = A (m,k) B (k,n) of the step. a_turned, b_turned: the operand lies transposed in memory.
struct ProductShape {
  int m, n, k;
  bool a_turned, b_turned;
  int count;  // times a step
  double flops() const { return 2.0 * m * n * k; }
};

// Seconds that the library takes for each shape, once; nothing where this build has no library.
// in_bf16: bf16 operands and result, else fp32. Operands are made here and freed.
std::vector<double> library_seconds(const std::vector<ProductShape>& shapes, bool in_bf16);
