// CUDA's runtime calls in a build without CUDA: each answers that it is not supported. So device.h is one text for all
// builds, and the CPU program takes no path that its tests do not. Only portable.cuh includes this.
#pragma once

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorNotSupported = 801
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 };
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventDisableTiming = 2;
using cudaEvent_t = struct CUevent_st*;
struct cudaDeviceProp {
  char name[256];
  size_t totalGlobalMem;
  int major, minor, multiProcessorCount, pciDomainID, pciBusID, pciDeviceID;
};

#define NO_CUDA(call)             \
  template <class... A>           \
  cudaError_t call(const A&...) { \
    return cudaErrorNotSupported; \
  }
NO_CUDA(cudaGetDeviceCount)
NO_CUDA(cudaSetDevice)
NO_CUDA(cudaGetDeviceProperties)
NO_CUDA(cudaDriverGetVersion)
NO_CUDA(cudaRuntimeGetVersion)
NO_CUDA(cudaMemGetInfo)
NO_CUDA(cudaMalloc)
NO_CUDA(cudaFree)
NO_CUDA(cudaMallocHost)
NO_CUDA(cudaFreeHost)
NO_CUDA(cudaMemcpyAsync)
NO_CUDA(cudaMemsetAsync)
NO_CUDA(cudaStreamCreateWithFlags)
NO_CUDA(cudaStreamDestroy)
NO_CUDA(cudaStreamSynchronize)
NO_CUDA(cudaEventCreateWithFlags)
NO_CUDA(cudaEventDestroy)
NO_CUDA(cudaEventRecord)
NO_CUDA(cudaEventSynchronize)
NO_CUDA(cudaEventElapsedTime)
#undef NO_CUDA
inline const char* cudaGetErrorString(cudaError_t) { return "this build has no GPU support"; }
