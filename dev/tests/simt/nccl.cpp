#include "dev/tests/simt/nccl/nccl.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <utility>
#include <vector>

#include "dev/tests/simt/engine.h"
#include "dev/tests/simt/streams.h"
#include "mcf/bf16.h"
#include "runtime/error.h"

namespace {

constexpr int most_ranks = 8;
constexpr size_t piece_bytes = 1 << 16;

// What a rank calls: all must call the same.
struct Operation {
  bool reduce;
  size_t count;
  ncclDataType_t type;
  int root;
  bool operator==(const Operation&) const = default;
  size_t element_bytes() const { return type == ncclFloat32 ? 4 : type == ncclBfloat16 ? 2 : 1; }
  std::string text() const {
    return strf("%s(count %zu, type %d, root %d)", reduce ? "ncclReduce" : "ncclBroadcast", count, type, root);
  }
};

// Memory that all ranks map. Zeros at first.
struct Shared {
  std::atomic<int> arrived, turn;
  Operation operations[most_ranks];
  alignas(64) char pieces[most_ranks][piece_bytes];
};

// Between ncclGroupStart and ncclGroupEnd: calls that wait for the end.
struct Issued {
  cudaStream_t stream;
  std::function<void()> work;
};
int open_groups = 0;
std::vector<Issued> group;

// As a ring adds: from the rank behind the root round to the root, each sum rounded to the type.
template <class T>
void add_up(const Shared& shared, int root, int ranks, void* out, size_t bytes) {
  const auto piece = [&](int hop) { return reinterpret_cast<const T*>(shared.pieces[(root + hop) % ranks]); };
  T* sum = static_cast<T*>(out);
  std::copy_n(piece(1), bytes / sizeof(T), sum);
  for (int hop = 2; hop <= ranks; hop++)
    for (size_t i = 0; i < bytes / sizeof(T); i++) store(sum[i], to_float(sum[i]) + to_float(piece(hop)[i]));
}

}  // namespace

struct ncclComm {
  int rank, ranks;
  Shared* shared;

  // Returns when all ranks are here. Polls, so that nothing need be set up; if one has died, the program's own watch
  // (runtime/star.h) ends the others.
  void meet() {
    const int turn = shared->turn;
    if (++shared->arrived == ranks) {
      shared->arrived = 0;
      shared->turn++;
    }
    while (shared->turn == turn) usleep(20);
  }

  void run(const Operation& operation, const char* send, char* receive) {
    shared->operations[rank] = operation;
    meet();
    for (int r = 0; r < ranks; r++)
      if (shared->operations[r] != operation)
        simt::fail("NCCL: rank %d calls %s, rank %d %s", rank, operation.text().c_str(), r,
                   shared->operations[r].text().c_str());
    const size_t total = operation.count * operation.element_bytes();
    for (size_t done = 0; done < total; done += piece_bytes) {
      const size_t n = std::min(piece_bytes, total - done);
      if (operation.reduce || rank == operation.root) std::copy_n(send + done, n, shared->pieces[rank]);
      meet();
      if (!operation.reduce)
        std::copy_n(shared->pieces[operation.root], n, receive + done);
      else if (rank == operation.root)
        operation.type == ncclFloat32 ? add_up<float>(*shared, rank, ranks, receive + done, n)
                                      : add_up<bf16>(*shared, rank, ranks, receive + done, n);
      meet();
    }
  }

  ncclResult_t issue(const Operation& operation, const void* send, void* receive, cudaStream_t stream) {
    const bool receives = !operation.reduce || rank == operation.root;
    if (operation.root < 0 || operation.root >= ranks || !operation.count) return ncclInvalidArgument;
    const size_t bytes = operation.count * operation.element_bytes();
    const std::string text = operation.text();
    simt::check_range(send, bytes, text.c_str());
    if (receives) simt::check_range(receive, bytes, text.c_str());
    const auto work = [=, this] { run(operation, static_cast<const char*>(send), static_cast<char*>(receive)); };
    group.push_back({stream, work});
    open_groups++;
    return ncclGroupEnd();
  }
};

ncclResult_t ncclGetVersion(int* version) {
  *version = 22800;
  return ncclSuccess;
}
// The id is the path of a file in memory, open in rank 0's process: it goes when all have gone.
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const int file = memfd_create("nccl", 0);
  if (file < 0 || ftruncate(file, sizeof(Shared))) return ncclSystemError;
  snprintf(id->internal, sizeof id->internal, "/proc/%d/fd/%d", getpid(), file);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  if (ranks > most_ranks || rank < 0 || rank >= ranks) return ncclInvalidArgument;
  const int file = open(id.internal, O_RDWR);
  if (file < 0) return ncclSystemError;
  void* shared = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (shared == MAP_FAILED) return ncclSystemError;
  *comm = new ncclComm{rank, ranks, static_cast<Shared*>(shared)};
  (*comm)->meet();
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  munmap(comm->shared, sizeof(Shared));
  delete comm;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
  }
  return "unknown result code";
}
const char* ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclGroupStart() {
  open_groups++;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (open_groups == 0) return ncclInvalidUsage;
  if (--open_groups > 0) return ncclSuccess;
  for (Issued& issued : std::exchange(group, {})) simt::submit(issued.stream, std::move(issued.work));
  return ncclSuccess;
}
ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  if (type == ncclChar) return ncclInvalidArgument;
  return comm->issue({true, count, type, root}, send, receive, stream);
}
ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return comm->issue({false, count, type, root}, send, receive, stream);
}
