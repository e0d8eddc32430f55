#include "dev/tests/simt/cublas/cublasLt.h"

#include <vector>

#include "dev/tests/simt/streams.h"
#include "mcf/bf16.h"
#include "runtime/error.h"

struct cublasLtMatmulDescOpaque {
  cublasOperation_t transa = CUBLAS_OP_N, transb = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  cudaDataType_t bias_type = CUDA_R_32F;
};
struct cublasLtMatrixLayoutOpaque {
  cudaDataType_t type;
  uint64_t rows, columns;
  int64_t ld;
};
struct cublasLtMatmulPreferenceOpaque {
  uint64_t values[5] = {};  // by attribute
};

namespace {

// Element (row, column) of a matrix stored by columns.
float element(const void* data, const cublasLtMatrixLayoutOpaque& l, uint64_t row, uint64_t column) {
  const size_t at = column * static_cast<size_t>(l.ld) + row;
  return l.type == CUDA_R_32F ? static_cast<const float*>(data)[at] : to_float(static_cast<const bf16*>(data)[at]);
}
float element(const void* data, const cublasLtMatrixLayoutOpaque& l, cublasOperation_t op, uint64_t row,
              uint64_t column) {
  return op == CUBLAS_OP_N ? element(data, l, row, column) : element(data, l, column, row);
}

bool fits(const cublasLtMatmulDescOpaque& d, const cublasLtMatrixLayoutOpaque& a, const cublasLtMatrixLayoutOpaque& b,
          const cublasLtMatrixLayoutOpaque& out) {
  const auto rows = [](const auto& l, auto op) { return op == CUBLAS_OP_N ? l.rows : l.columns; };
  const auto columns = [](const auto& l, auto op) { return op == CUBLAS_OP_N ? l.columns : l.rows; };
  for (const auto* l : {&a, &b, &out})
    if (l->ld < static_cast<int64_t>(l->rows)) return false;
  return a.type == b.type && rows(a, d.transa) == out.rows && columns(b, d.transb) == out.columns &&
         columns(a, d.transa) == rows(b, d.transb);
}

}  // namespace

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = nullptr;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t, cudaDataType_t) {
  *d = new cublasLtMatmulDescOpaque;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  const auto set = [&](auto& field) {
    if (bytes != sizeof field) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&field, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
  };
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return set(d->transa);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return set(d->transb);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return set(d->epilogue);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return set(d->bias);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      return set(d->bias_type);
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* l, cudaDataType_t type, uint64_t rows,
                                          uint64_t columns, int64_t ld) {
  *l = new cublasLtMatrixLayoutOpaque{type, rows, columns, ld};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) {
  *p = new cublasLtMatmulPreferenceOpaque;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t bytes) {
  if (bytes != (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8u : 4u)) return CUBLAS_STATUS_INVALID_VALUE;
  memcpy(&p->values[attribute], value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
  delete p;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t out, cublasLtMatmulPreference_t p, int requested,
                                              cublasLtMatmulHeuristicResult_t* results, int* found) {
  *found = 0;
  if (requested < 1 || !fits(*d, *a, *b, *out)) return CUBLAS_STATUS_INVALID_VALUE;
  for (int i = 0; i < 4; i++) results->algo.alignment[i] = p->values[i + 1];
  results->algo.workspace_bytes = p->values[0];
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t d, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* out,
                              cublasLtMatrixLayout_t out_layout, const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
  if (!fits(*d, *a_layout, *b_layout, *out_layout) || c != out || c_layout != out_layout)
    return CUBLAS_STATUS_INVALID_VALUE;
  if (*static_cast<const float*>(alpha) != 1 || workspace_bytes < algorithm->workspace_bytes)
    return CUBLAS_STATUS_INVALID_VALUE;
  const void* operands[] = {a, b, c, out};
  for (int i = 0; i < 4; i++) {
    if (!algorithm->alignment[i] || reinterpret_cast<uintptr_t>(operands[i]) % algorithm->alignment[i])
      return CUBLAS_STATUS_INVALID_VALUE;
    simt::check_argument(operands[i], "cublasLtMatmul");
  }
  simt::check_argument(workspace, "cublasLtMatmul");
  const bool bias = d->epilogue == CUBLASLT_EPILOGUE_BIAS, accumulate = *static_cast<const float*>(beta) != 0;
  if (bias) simt::check_argument(d->bias, "cublasLtMatmul");
  simt::submit(stream, [=, d = *d, al = *a_layout, bl = *b_layout, ol = *out_layout] {
    const uint64_t K = d.transa == CUBLAS_OP_N ? al.columns : al.rows;
    // Operands as dense fp32 rows first: the sums are then plain dot products.
    std::vector<float> rows(ol.rows * K), columns(ol.columns * K);
    for (uint64_t i = 0; i < ol.rows; i++)
      for (uint64_t k = 0; k < K; k++) rows[i * K + k] = element(a, al, d.transa, i, k);
    for (uint64_t j = 0; j < ol.columns; j++)
      for (uint64_t k = 0; k < K; k++) columns[j * K + k] = element(b, bl, d.transb, k, j);
    for (uint64_t j = 0; j < ol.columns; j++)
      for (uint64_t i = 0; i < ol.rows; i++) {
        float sum = 0;
        const float *x = &rows[i * K], *y = &columns[j * K];
#pragma omp simd reduction(+ : sum)
        for (uint64_t k = 0; k < K; k++) sum += x[k] * y[k];
        if (accumulate) sum += element(c, ol, i, j);
        if (bias)
          sum += d.bias_type == CUDA_R_32F ? static_cast<const float*>(d.bias)[i]
                                           : to_float(static_cast<const bf16*>(d.bias)[i]);
        const size_t at = j * static_cast<size_t>(ol.ld) + i;
        if (ol.type == CUDA_R_32F)
          static_cast<float*>(out)[at] = sum;
        else
          store(static_cast<bf16*>(out)[at], sum);
      }
  });
  return CUBLAS_STATUS_SUCCESS;
}
