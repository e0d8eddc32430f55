// The ranks of a run: who they are, and what they tell each other.
//
// One rank is a run without any of this: no socket, no MPI, no NCCL. Several find each other through a star of TCP
// connections (star.h), which carries small things and watches over all. Gradients and weights go over NCCL between
// GPUs, over MPI between CPUs, and over the star where there is neither.
//
// A step with several ranks: each adds up the gradients of its own sequences; reduce_scatter() leaves in each rank's
// part (kernels/blocks.h) the sum of all; then either all gradients are gathered and every rank updates everything
// (--zero=0), or each updates its part and the weights are gathered (--zero=1). Both do the same sums, so they agree
// bit for bit.
//
// Calls are collective: all ranks make the same ones in the same order.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/blocks.h"
#include "kernels/rank_sum.h"
#include "runtime/star.h"

class Mpi;
class Nccl;
struct CUstream_st;

class Comm {
 public:
  Comm();  // one rank
  ~Comm();
  Comm(const Comm&) = delete;

  // Becomes one of several ranks if the environment says so (launch.h). On all but rank 0 stdout goes nowhere from then
  // on. Throws UsageError, RunError.
  void join();
  // Prints the line as the error that ended the run, ends all ranks with this status, and returns it where there is
  // only one.
  int fail(int status, const std::string& line);
  void leave();  // the end of a good run

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  int local_rank() const { return local_rank_; }    // among the ranks of this machine
  int local_ranks() const { return local_ranks_; }  // on this machine
  std::string transport() const;                    // of gradients: "NCCL 2.28.9", "MPI", "TCP"
  // CPU threads for this rank: ranks of one machine share its cores, unless the flag or OMP_NUM_THREADS says otherwise.
  int threads(int flag) const;

  // Small things in host memory.
  template <class T>
  std::vector<T> gather(const T& mine) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> all(static_cast<size_t>(ranks_), mine);
    std::vector<size_t> first(all.size() + 1);
    for (size_t r = 0; r < first.size(); r++) first[r] = r;
    share(all.data(), first);
    return all;
  }
  std::vector<std::string> gather_text(const std::string& mine);
  // Rank r has data[first[r]] to data[first[r + 1]]; afterwards all have all.
  template <class T>
  void share(T* data, const std::vector<size_t>& first) {
    all_gather_bytes(data, sizeof(T), first, true);
  }
  double sum(double mine) {  // in rank order
    double total = 0;
    for (const double x : gather(mine)) total += x;
    return total;
  }
  // Throws RunError on rank 0 where a rank has other text than rank 0. what: "flags", for the message.
  void require_same(const char* what, const std::string& mine);
  // Lists "ranks 0-3 on host: text", one line for neighbours that say the same. Throws RunError where two ranks have
  // the same device id; "" is not looked at.
  std::vector<std::string> list_devices(const std::string& id, const std::string& text);

  // Gradients and weights, in host memory, or on the GPU after use_gpu().
  // Connects to the other ranks' GPUs. The current CUDA device is this rank's; compute: the stream that backward runs
  // on.
  void use_gpu(CUstream_st* compute);
  // In this rank's part, between elements begin and end: the sum of all ranks'. What lies in other parts is spent.
  // On the GPU it starts once backward has come this far, and runs beside it.
  template <class floatX>
  void reduce_scatter(floatX* grads, size_t begin, size_t end, const Cut& cut);
  // Every rank's part, to all. first: cut.elements, or cut.blocks for an array with an entry a block.
  template <class T>
  void all_gather(T* data, const std::vector<size_t>& first) {
    all_gather_bytes(data, sizeof(T), first, false);
  }
  void wait();  // the compute stream goes on when all the above is done

 private:
  void exchange(const std::vector<Bytes>& send, const std::vector<Bytes>& receive);
  void all_gather_bytes(void* data, size_t element, const std::vector<size_t>& first, bool small);
  void reduce_scatter_gpu(void* grads, size_t element, size_t begin, size_t end, const std::vector<size_t>& first);

  int rank_ = 0, ranks_ = 1, local_rank_ = 0, local_ranks_ = 1;
  int sharing_cores_ = 1;  // ranks of this machine that may use the same cores as this one
  double reply_timeout_s_ = 0;
  std::unique_ptr<Star> star_;
  std::unique_ptr<Mpi> mpi_;
  std::unique_ptr<Nccl> nccl_;
  std::vector<char> incoming_;
};

// "ranks 0 and 2 both use ..." where two ids are the same and not empty, else "".
std::string duplicate_device(const std::vector<std::string>& ids, const std::vector<std::string>& texts);

template <class floatX>
void Comm::reduce_scatter(floatX* grads, size_t begin, size_t end, const Cut& cut) {
  if (ranks_ == 1) return;
  if (nccl_) return reduce_scatter_gpu(grads, sizeof(floatX), begin, end, cut.elements);
  const size_t ranks = static_cast<size_t>(ranks_), me = static_cast<size_t>(rank_);
  const size_t chunk = std::max(block_elements, (size_t{4} << 20) / ranks);  // of each part at a time: 16 MiB of fp32
  incoming_.resize(std::max(incoming_.size(), ranks * chunk * sizeof(floatX)));
  floatX* incoming = reinterpret_cast<floatX*>(incoming_.data());

  // What of rank r's part lies within [begin, end), and of that what chunk number i covers.
  const auto piece = [&](size_t r, size_t i) {
    const size_t b = std::max(begin, cut.elements[r]), e = std::max(b, std::min(end, cut.elements[r + 1]));
    const size_t from = std::min(e, b + i * chunk);
    return std::pair{from, std::min(e, from + chunk) - from};
  };
  size_t longest = 0;
  for (size_t r = 0; r < ranks; r++) longest = std::max(longest, cut.elements[r + 1] - cut.elements[r]);
  for (size_t i = 0; i * chunk < longest; i++) {
    std::vector<Bytes> send(ranks), receive(ranks);
    std::vector<const floatX*> addends(ranks);
    const auto [mine, n] = piece(me, i);
    size_t traffic = 0;
    for (size_t r = 0; r < ranks; r++) {
      const auto [theirs, count] = piece(r, i);
      traffic += count;
      addends[r] = r == me ? grads + mine : incoming + r * chunk;
      if (r == me) continue;
      send[r] = {grads + theirs, count * sizeof(floatX)};
      receive[r] = {incoming + r * chunk, n * sizeof(floatX)};
    }
    if (!traffic) break;
    exchange(send, receive);
    sum_in_rank_order(grads + mine, addends, n);
  }
}
