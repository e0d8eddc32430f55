// Names every kernel of kernels/ but attention's, in both element types and all variants, so that nvcc compiles them.
// Never run: dev/tests/nvcc_check.sh reads what the compiler says.
#include "kernels/encoder.cuh"
#include "kernels/fused_classifier.cuh"
#include "kernels/gelu.cuh"
#include "kernels/global_norm.cuh"
#include "kernels/layernorm.cuh"

template <class X>
void layers(X* x, float* f, double* d, int* i, const Block* blocks, cudaStream_t stream) {
  encoder_forward_cuda(x, i, x, x, 1, 1, 1, stream);
  encoder_backward_cuda(f, x, x, i, f, 1, 1, 1, stream);
  add_embedding_gradient_cuda(x, f, 1, stream);
  layernorm_forward_cuda(x, f, f, x, x, x, 1, 1, 1, stream);
  residual_layernorm_forward_cuda(x, x, f, f, x, x, x, x, 1, 1, 1, stream);
  layernorm_backward_cuda(x, x, x, x, x, x, f, f, f, 1, 1, 1, stream);
  gelu_forward_cuda(x, x, 1, stream);
  gelu_backward_cuda(x, x, 1, stream);
  fused_classifier_cuda(f, x, i, 1.0f, 1, 1, 1, true, stream);
  bias_backward_cuda(x, x, f, 1, 1, stream);
  block_squares_cuda(d, x, blocks, 1, stream);
  norm_of_squares_cuda(d, d, 1, stream);
}
template void layers(float*, float*, double*, int*, const Block*, cudaStream_t);
template void layers(bf16*, float*, double*, int*, const Block*, cudaStream_t);
