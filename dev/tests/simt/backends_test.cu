// The examples in the other two builds: by nvcc, to see that they are CUDA (compiled only); by g++ without SIMT, to see
// that the CPU program takes them, names no kernel at link time, and ends a launch in a clear error.
#include "dev/tests/simt/examples.cuh"

int main() {
  try {
    reverse_blocks_gpu(nullptr, nullptr, 64, nullptr);
    row_sums_gpu(nullptr, nullptr, 1, 1, nullptr);
    layernorm_example_gpu<float>(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 1, 1, nullptr);
    gemm_example_gpu(nullptr, nullptr, nullptr, 1, 8, 64, nullptr);
  } catch (const RunError& error) {
    puts(error.what());
    return strstr(error.what(), "no GPU in this build") ? 0 : 1;
  }
  return 1;
}
