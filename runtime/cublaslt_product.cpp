#include "runtime/cublaslt_product.h"

#include <algorithm>
#include <map>
#include <tuple>

#ifdef WITH_CUDA
#include <cublasLt.h>

namespace {

#define CUBLAS_CHECK(call)                                                                            \
  do {                                                                                                \
    if (const cublasStatus_t status_ = (call); status_ != CUBLAS_STATUS_SUCCESS)                      \
      RUN_ERROR("%s:%d: %s: cuBLAS status %d", __FILE__, __LINE__, #call, static_cast<int>(status_)); \
  } while (0)

constexpr cudaDataType_t data_type(const float*) { return CUDA_R_32F; }
constexpr cudaDataType_t data_type(const bf16*) { return CUDA_R_16BF; }

// What cuBLASLt needs to multiply one shape. It thinks in columns: row-major out (M,N) is its D (N,M), and D = b^T a^T.
class Plan {
 public:
  template <class Out, class floatX>
  Plan(const Out*, const Matrix<floatX>& a, const Matrix<floatX>& b, int M, int N, int K, bool bias, bool accumulate,
       size_t workspace_bytes, size_t alignment, cublasLtHandle_t handle) {
    // A row-major operand is the transpose that is wanted already; the other one is transposed by the library.
    const cublasOperation_t first = b.column == 1 ? CUBLAS_OP_N : CUBLAS_OP_T;
    const cublasOperation_t second = a.column == 1 ? CUBLAS_OP_N : CUBLAS_OP_T;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, first);
    set(CUBLASLT_MATMUL_DESC_TRANSB, second);
    if (bias) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(b.data));
    }
    const auto layout = [](cublasLtMatrixLayout_t& l, cudaDataType_t type, int rows, int columns, int64_t ld) {
      // Of a single row or column the stride says nothing: where both are 1, it may be less than the library wants.
      CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&l, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns),
                                              std::max<int64_t>(ld, rows)));
    };
    layout(b_layout, data_type(b.data), b.column == 1 ? N : K, b.column == 1 ? K : N, b.column == 1 ? b.row : b.column);
    layout(a_layout, data_type(a.data), a.column == 1 ? K : M, a.column == 1 ? M : K, a.column == 1 ? a.row : a.column);
    layout(out_layout, data_type(static_cast<const Out*>(nullptr)), N, M, N);

    cublasLtMatmulPreference_t preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
    for (const auto operand : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                               CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      prefer(operand, static_cast<uint32_t>(alignment));
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, description, b_layout, a_layout, out_layout,
                                                                 out_layout, preference, 1, &result, &found);
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    if (status != CUBLAS_STATUS_SUCCESS || found == 0)
      RUN_ERROR("cuBLASLt has no algorithm for a product (%d,%d) by (%d,%d) of %zu-byte elements%s (status %d)", M, K,
                K, N, sizeof(floatX), accumulate ? ", accumulating" : "", static_cast<int>(status));
    algorithm = result.algo;
  }

  cublasLtMatmulDesc_t description = nullptr;
  cublasLtMatrixLayout_t a_layout = nullptr, b_layout = nullptr, out_layout = nullptr;
  cublasLtMatmulAlgo_t algorithm{};

 private:
  template <class Value>
  void set(cublasLtMatmulDescAttributes_t attribute, Value value) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(description, attribute, &value, sizeof value));
  }
};

// Largest power of two up to 256 that divides all of these byte counts or addresses.
size_t common_alignment(std::initializer_list<uintptr_t> values) {
  uintptr_t bits = 256;
  for (const uintptr_t v : values) bits |= v;
  return bits & ~(bits - 1);
}

template <class Out, class floatX>
void multiply(Out* out, const Matrix<floatX>& a, const Matrix<floatX>& b, const floatX* bias, int M, int N, int K,
              bool accumulate, Device& device) {
  // Plans and the handle live as long as the process. Slots 0 and 1 of the device's scratch belong to the layers.
  static cublasLtHandle_t handle = [] {
    cublasLtHandle_t h;
    CUBLAS_CHECK(cublasLtCreate(&h));
    return h;
  }();
  const size_t workspace_bytes = size_t{device.properties().major >= 9 ? 32u : 4u} << 20;  // as NVIDIA advises
  char* workspace = device.scratch<char>(2, workspace_bytes);
  const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  const size_t alignment = common_alignment({address(out), address(a.data), address(b.data)});
  using Key = std::tuple<int, int, int, int64_t, int64_t, int64_t, int64_t, bool, bool, size_t>;
  static auto& plans = *new std::map<Key, Plan>;
  const Key key{M, N, K, a.row, a.column, b.row, b.column, bias != nullptr, accumulate, alignment};
  auto plan = plans.find(key);
  if (plan == plans.end())
    plan = plans.emplace(key, Plan(out, a, b, M, N, K, bias, accumulate, workspace_bytes, alignment, handle)).first;
  Plan& p = plan->second;
  if (bias)
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p.description, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias));
  const float alpha = 1.0f, beta = accumulate ? 1.0f : 0.0f;
  CUBLAS_CHECK(cublasLtMatmul(handle, p.description, &alpha, b.data, p.b_layout, a.data, p.a_layout, &beta, out,
                              p.out_layout, out, p.out_layout, &p.algorithm, workspace, workspace_bytes,
                              device.stream()));
}

}  // namespace
#else
namespace {
template <class Out, class floatX>
[[noreturn]] void multiply(Out*, const Matrix<floatX>&, const Matrix<floatX>&, const floatX*, int, int, int, bool,
                           Device&) {
  RUN_ERROR("this build has no GPU support");
}
}  // namespace
#endif

void cublaslt_product(float* out, const Matrix<float>& a, const Matrix<float>& b, const float* bias, int M, int N,
                      int K, bool accumulate, Device& device) {
  multiply(out, a, b, bias, M, N, K, accumulate, device);
}
void cublaslt_product(bf16* out, const Matrix<bf16>& a, const Matrix<bf16>& b, const bf16* bias, int M, int N, int K,
                      bool accumulate, Device& device) {
  multiply(out, a, b, bias, M, N, K, accumulate, device);
}
void cublaslt_product(float* out, const Matrix<bf16>& a, const Matrix<bf16>& b, const bf16* bias, int M, int N, int K,
                      bool accumulate, Device& device) {
  multiply(out, a, b, bias, M, N, K, accumulate, device);
}
