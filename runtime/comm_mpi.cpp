#include "runtime/comm_mpi.h"

#include "runtime/error.h"

#ifdef WITH_MPI
#include <mpi.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>

bool Mpi::available() { return true; }

Mpi::Mpi() {
  int level = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks_);
}
Mpi::~Mpi() { MPI_Finalize(); }

void Mpi::broadcast(void* data, size_t n) { MPI_Bcast(data, static_cast<int>(n), MPI_BYTE, 0, MPI_COMM_WORLD); }

int Mpi::exchange(const std::vector<Bytes>& send, const std::vector<Bytes>& receive, double timeout_s) {
  std::vector<MPI_Request> requests;
  std::vector<int> with;  // the rank of each request
  const auto each_other = [&](const std::vector<Bytes>& list, auto&& start) {
    for (int step = 1; step < ranks_; step++) {  // every rank begins with another one
      const int r = (rank_ + step) % ranks_;
      const Bytes& b = list[static_cast<size_t>(r)];
      if (!b.n) continue;
      requests.emplace_back(), with.push_back(r);
      start(b.data, static_cast<int>(b.n), r, &requests.back());
    }
  };
  each_other(receive, [](void* data, int n, int r, MPI_Request* request) {
    MPI_Irecv(data, n, MPI_BYTE, r, 0, MPI_COMM_WORLD, request);
  });
  each_other(send, [](void* data, int n, int r, MPI_Request* request) {
    MPI_Isend(data, n, MPI_BYTE, r, 0, MPI_COMM_WORLD, request);
  });

  // Not MPI_Waitall, which waits for ever. Ranks that share cores must let each other run.
  using clock = std::chrono::steady_clock;
  const auto start = clock::now();
  for (int spins = 0, done = 0;; spins++) {
    MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE);
    if (done) return -1;
    sched_yield();
    if (spins > 2000) usleep(50);
    if (spins % 1024 == 1023 && std::chrono::duration<double>(clock::now() - start).count() > timeout_s) break;
  }
  for (size_t i = 0; i < requests.size(); i++) {
    int done = 0;
    MPI_Test(&requests[i], &done, MPI_STATUS_IGNORE);
    if (!done) return with[i];
  }
  return -1;
}

#else

bool Mpi::available() { return false; }
Mpi::Mpi() { RUN_ERROR("this build has no MPI"); }
Mpi::~Mpi() = default;
void Mpi::broadcast(void*, size_t) {}
int Mpi::exchange(const std::vector<Bytes>&, const std::vector<Bytes>&, double) { return -1; }

#endif
