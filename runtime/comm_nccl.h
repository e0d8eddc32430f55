// NCCL as what carries gradients and weights between GPUs. Its work runs on a stream of its own, beside backward.
//
// A rank owns a range of whole blocks, and the ranges differ by up to a block, while ncclReduceScatter and
// ncclAllGather want equal counts. So a reduce-scatter is a group of ncclReduce, one to each owner, and an all-gather a
// group of ncclBroadcast, one from each: N / (N-1) of the ring's traffic, and no padding, staging copy or limit on the
// cut.
#pragma once
#include <array>
#include <cstddef>
#include <string>
#include <vector>

struct CUstream_st;  // cudaStream_t is a pointer to this

class Nccl {
 public:
  using Id = std::array<char, 128>;  // ncclUniqueId
  static bool available();           // in this build
  static std::string version();      // "NCCL 2.28.9"
  static Id make_id();               // on rank 0; all ranks construct with it

  // On the current CUDA device. compute: the stream that fills the gradients and reads the results.
  Nccl(const Id& id, int rank, int ranks, CUstream_st* compute);
  ~Nccl();
  Nccl(const Nccl&) = delete;

  // Rank r owns the elements first[r] to first[r + 1] of the flat buffer. Both start when what the compute stream holds
  // by now is done, and return at once; element_bytes is 2 (bf16) or 4 (fp32) for sums.
  void reduce_scatter(void* data, size_t element_bytes, size_t begin, size_t end, const std::vector<size_t>& first);
  void all_gather(void* data, size_t element_bytes, const std::vector<size_t>& first);
  // The compute stream goes on when all that was started is done. Throws RunError if NCCL has met an error.
  void wait();

 private:
  struct State;
  void follow_compute();
  State* state_;
};
