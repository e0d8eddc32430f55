// A small TCP network of the ranks: rank 0 listens, every other rank connects to it. It carries what is small (names,
// checks, sums, NCCL's id), it carries gradients too where there is neither MPI nor NCCL, and it watches: a rank that
// fails or dies ends all ranks with one line that names it.
#pragma once
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct Bytes {
  void* data = nullptr;
  size_t n = 0;
};

class Star {
 public:
  struct Peer {
    std::string host;
    int pid = 0;
  };

  Star(int rank, int ranks, double start_timeout_s, double reply_timeout_s);
  ~Star();
  Star(const Star&) = delete;

  int listen(int port);  // rank 0, before connect(); port 0: any that is free. Returns the port.
  // All ranks. Rank 0 waits for the others, which try each address until it is there. Throws RunError when the time is
  // over: which ranks are missing, or who does not answer.
  void connect(const std::vector<std::string>& addresses, int port);

  const std::vector<Peer>& peers() const { return peers_; }  // (ranks)
  std::string name(int rank) const;                          // "rank 1 (host, process 123)"

  // Sends send[r] to rank r and fills receive[r] with what rank r sends here; both ends know the sizes. The entries of
  // this rank itself are not looked at. Throws RunError when a rank does not answer in time.
  void exchange(const std::vector<Bytes>& send, const std::vector<Bytes>& receive);

  // Ends all ranks: rank 0 prints the line (with "rank 2: " before it where another rank failed), and all exit with
  // this status. The first failure wins, so that one that all ranks meet is printed once.
  [[noreturn]] void fail(int status, const std::string& line);
  // All ranks, at the end of a good run: from now on the others may go.
  void leave();

 private:
  struct Watch;
  std::string gone(int rank) const;  // the line for a rank that has died
  void say_hello(int fd, char kind);
  void greet(int listener);
  void send_all(int rank, const void* data, size_t n);
  void receive_all(int rank, void* data, size_t n);

  int rank_, ranks_;
  double start_timeout_s_, reply_timeout_s_;
  int listener_ = -1;
  std::vector<int> data_, watch_;  // (ranks) sockets; -1 where there is none
  std::vector<Peer> peers_;
  mutable std::mutex names_;  // guards peers_ while the watcher runs
  std::unique_ptr<Watch> watcher_;
};
