#include "runtime/comm_nccl.h"

#include "runtime/error.h"

#ifdef WITH_NCCL
#include <nccl.h>  // with the CUDA runtime

#include <algorithm>

#define CUDA_CHECK(call)                                                                         \
  do {                                                                                           \
    if (const cudaError_t error = (call)) RUN_ERROR("%s: %s", #call, cudaGetErrorString(error)); \
  } while (0)
#define NCCL_CHECK(call)                                                                                           \
  do {                                                                                                             \
    if (const ncclResult_t result = (call); result != ncclSuccess)                                                 \
      RUN_ERROR("NCCL: %s: %s; NCCL_DEBUG=WARN says more", ncclGetErrorString(result), ncclGetLastError(nullptr)); \
  } while (0)

struct Nccl::State {
  int ranks;
  CUstream_st *compute, *stream;
  cudaEvent_t compute_reached, done;
  ncclComm_t comm;
};

static_assert(sizeof(Nccl::Id) == sizeof(ncclUniqueId));

bool Nccl::available() { return true; }
std::string Nccl::version() {
  int v = 0;
  NCCL_CHECK(ncclGetVersion(&v));
  return strf("NCCL %d.%d.%d", v / 10000, v / 100 % 100, v % 100);
}
Nccl::Id Nccl::make_id() {
  ncclUniqueId id;
  NCCL_CHECK(ncclGetUniqueId(&id));
  Id out;
  std::copy_n(id.internal, out.size(), out.begin());
  return out;
}

Nccl::Nccl(const Id& id, int rank, int ranks, CUstream_st* compute) : state_(new State{}) {
  State& s = *state_;
  s.ranks = ranks, s.compute = compute;
  CUDA_CHECK(cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking));
  CUDA_CHECK(cudaEventCreateWithFlags(&s.compute_reached, cudaEventDisableTiming));
  CUDA_CHECK(cudaEventCreateWithFlags(&s.done, cudaEventDisableTiming));
  ncclUniqueId unique;
  std::copy(id.begin(), id.end(), unique.internal);
  NCCL_CHECK(ncclCommInitRank(&s.comm, ranks, unique, rank));
}
Nccl::~Nccl() {
  ncclCommDestroy(state_->comm);
  cudaEventDestroy(state_->done), cudaEventDestroy(state_->compute_reached);
  cudaStreamDestroy(state_->stream);
  delete state_;
}

void Nccl::follow_compute() {
  CUDA_CHECK(cudaEventRecord(state_->compute_reached, state_->compute));
  CUDA_CHECK(cudaStreamWaitEvent(state_->stream, state_->compute_reached, 0));
}

void Nccl::reduce_scatter(void* data, size_t element_bytes, size_t begin, size_t end,
                          const std::vector<size_t>& first) {
  follow_compute();
  const ncclDataType_t type = element_bytes == 2 ? ncclBfloat16 : ncclFloat32;
  NCCL_CHECK(ncclGroupStart());
  for (int r = 0; r < state_->ranks; r++) {
    const size_t b = std::max(begin, first[static_cast<size_t>(r)]),
                 e = std::min(end, first[static_cast<size_t>(r) + 1]);
    if (b >= e) continue;
    char* piece = static_cast<char*>(data) + b * element_bytes;
    NCCL_CHECK(ncclReduce(piece, piece, e - b, type, ncclSum, r, state_->comm, state_->stream));
  }
  NCCL_CHECK(ncclGroupEnd());
}

void Nccl::all_gather(void* data, size_t element_bytes, const std::vector<size_t>& first) {
  follow_compute();
  NCCL_CHECK(ncclGroupStart());
  for (int r = 0; r < state_->ranks; r++) {
    const size_t b = first[static_cast<size_t>(r)], n = first[static_cast<size_t>(r) + 1] - b;
    if (!n) continue;
    char* piece = static_cast<char*>(data) + b * element_bytes;
    NCCL_CHECK(ncclBroadcast(piece, piece, n * element_bytes, ncclChar, r, state_->comm, state_->stream));
  }
  NCCL_CHECK(ncclGroupEnd());
}

void Nccl::wait() {
  CUDA_CHECK(cudaEventRecord(state_->done, state_->stream));
  CUDA_CHECK(cudaStreamWaitEvent(state_->compute, state_->done, 0));
  ncclResult_t met = ncclSuccess;
  NCCL_CHECK(ncclCommGetAsyncError(state_->comm, &met));
  NCCL_CHECK(met);
}

#else

bool Nccl::available() { return false; }
std::string Nccl::version() { return ""; }
Nccl::Id Nccl::make_id() { return {}; }
Nccl::Nccl(const Id&, int, int, CUstream_st*) : state_(nullptr) { RUN_ERROR("this build has no NCCL"); }
Nccl::~Nccl() = default;
void Nccl::reduce_scatter(void*, size_t, size_t, size_t, const std::vector<size_t>&) {}
void Nccl::all_gather(void*, size_t, const std::vector<size_t>&) {}
void Nccl::wait() {}

#endif
