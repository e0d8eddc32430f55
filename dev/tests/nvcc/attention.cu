// Every attention kernel that the launchers can reach, for nvcc without a GPU: no warning, no spill (-Xptxas -v), and
// the registers that the tables of tile sizes allow.
#include "kernels/attention_backward.cuh"
#include "kernels/attention_forward.cuh"

template void attention_forward_cuda(bf16*, float*, const bf16*, int, int, int, int, cudaStream_t);
template void attention_forward_cuda(float*, float*, const float*, int, int, int, int, cudaStream_t);
template void attention_backward_cuda(bf16*, const bf16*, const bf16*, const float*, float*, const bf16*, int, int, int,
                                      int, cudaStream_t);
template void attention_backward_cuda(float*, const float*, const float*, const float*, float*, const float*, int, int,
                                      int, int, cudaStream_t);
