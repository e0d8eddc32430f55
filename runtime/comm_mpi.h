// MPI as what carries gradients and weights between the ranks' host memories. Bytes only: MPI has no bf16, and its sums
// add in an order of their own.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "runtime/star.h"

class Mpi {
 public:
  static bool available();  // in this build
  Mpi();                    // starts MPI, 0.3 s
  ~Mpi();                   // at the end of a good run only
  Mpi(const Mpi&) = delete;
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  void broadcast(void* data, size_t n);  // from rank 0

  // As Star::exchange(), at most 2 GiB an entry. Returns -1, or the rank that has not taken part in time.
  int exchange(const std::vector<Bytes>& send, const std::vector<Bytes>& receive, double timeout_s);

 private:
  int rank_ = 0, ranks_ = 1;
};
