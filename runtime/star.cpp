// Every rank but 0 has two connections to rank 0: one for data, used by the main thread alone, and one for the watching
// thread, on which there is silence until a rank ends, well ('B') or badly ('E', status, text). The end of a connection
// without a word before it is the death of a process; keep-alive probes find the death of a machine in 40 s.
#include "runtime/star.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "runtime/error.h"

namespace {

constexpr uint64_t hello_magic = 0x314d4d4f43545047;  // "GPTCOMM1"

struct Hello {
  uint64_t magic = hello_magic;
  int32_t rank, ranks, pid;
  char kind;  // 'D' data, 'W' watch
  char host[107] = {};
};

struct Trouble {  // what a rank says before it ends badly
  char kind = 'E';
  uint8_t status;
  uint16_t length;
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::string host_name() {
  char name[sizeof(Hello::host)] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

void set_timeout(int fd, int option, double seconds) {
  const time_t whole = static_cast<time_t>(seconds);
  const timeval t{whole, static_cast<suseconds_t>((seconds - static_cast<double>(whole)) * 1e6)};
  setsockopt(fd, SOL_SOCKET, option, &t, sizeof t);
}

void set_options(int fd) {
  const auto set = [&](int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof value); };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 20), set(IPPROTO_TCP, TCP_KEEPINTVL, 5), set(IPPROTO_TCP, TCP_KEEPCNT, 4);
}

// 0, or the errno that stopped it; ECONNRESET for the end of the connection, EAGAIN when the socket's time is over.
int try_send(int fd, const void* data, size_t n) {
  for (size_t done = 0; done < n;) {
    const ssize_t k = send(fd, static_cast<const char*>(data) + done, n - done, MSG_NOSIGNAL);
    if (k < 0 && errno == EINTR) continue;
    if (k < 0) return errno;
    done += static_cast<size_t>(k);
  }
  return 0;
}
int try_receive(int fd, void* data, size_t n) {
  for (size_t done = 0; done < n;) {
    const ssize_t k = recv(fd, static_cast<char*>(data) + done, n - done, 0);
    if (k < 0 && errno == EINTR) continue;
    if (k <= 0) return k < 0 ? errno : ECONNRESET;
    done += static_cast<size_t>(k);
  }
  return 0;
}

void send_trouble(int fd, int status, std::string line) {
  line.resize(std::min<size_t>(line.size(), 4000));
  const Trouble trouble{.status = static_cast<uint8_t>(status), .length = static_cast<uint16_t>(line.size())};
  try_send(fd, &trouble, sizeof trouble);
  try_send(fd, line.data(), line.size());
}

// A socket that is connected to address:port, or -1 and why.
int try_connect(const std::string& address, int port, std::string* why) {
  addrinfo hints{}, *list = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (const int error = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &list)) {
    *why = gai_strerror(error);
    return -1;
  }
  int fd = -1;
  for (const addrinfo* a = list; a && fd < 0; a = a->ai_next) {
    fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
    if (fd < 0) continue;
    set_timeout(fd, SO_SNDTIMEO, 2);  // of connect() too
    if (!connect(fd, a->ai_addr, a->ai_addrlen)) continue;
    *why = strerror(errno == EINPROGRESS ? ETIMEDOUT : errno);
    close(fd);
    fd = -1;
  }
  freeaddrinfo(list);
  return fd;
}

}  // namespace

struct Star::Watch {
  Star& star;
  int wake[2];                       // a pipe that ends the thread
  std::atomic<bool> leaving{false};  // connections may end now
  std::mutex ending;                 // held for ever by the thread that ends this process
  std::thread thread;

  explicit Watch(Star& s) : star(s) {
    if (pipe(wake)) RUN_ERROR("cannot create a pipe: %s", strerror(errno));
    thread = std::thread([this] { run(); });
  }
  ~Watch() {
    if (write(wake[1], "", 1) == 1) thread.join();
    close(wake[0]), close(wake[1]);
  }

  // Ends this process, and on rank 0 all others first.
  [[noreturn]] void end(int status, const std::string& line) {
    ending.lock();
    if (!line.empty()) fprintf(stderr, "train_gpt: error: %s\n", line.c_str());
    if (star.rank_ == 0) {
      for (const int fd : star.watch_)
        if (fd >= 0) send_trouble(fd, status, ""), shutdown(fd, SHUT_WR);
      // The others go first: what they have not read yet would be lost with this process.
      char rest[256];
      const double until = now() + 2;
      for (const int fd : star.watch_)
        if (fd >= 0) {
          set_timeout(fd, SO_RCVTIMEO, 0.2);
          ssize_t n;
          do n = recv(fd, rest, sizeof rest, 0);
          while (now() < until && (n > 0 || (n < 0 && errno == EAGAIN)));
        }
    }
    _exit(status);
  }

  // A rank has spoken or gone. Returns false where it has left in peace.
  bool hear(int rank) {
    const int fd = star.watch_[static_cast<size_t>(rank)];
    Trouble trouble;
    if (try_receive(fd, &trouble.kind, 1)) {
      if (leaving) return false;
      // One rank speaks for all that find the same.
      const bool speaks = star.rank_ == 0 || star.rank_ == 1;
      end(1, speaks ? star.gone(rank) : "");
    }
    if (trouble.kind == 'B') return false;
    set_timeout(fd, SO_RCVTIMEO, 5);
    std::string line;
    if (!try_receive(fd, &trouble.status, sizeof trouble - 1)) line.resize(trouble.length);
    if (try_receive(fd, line.data(), line.size())) line = "stopped, and its last words were lost";
    end(trouble.status, star.rank_ == 0 ? strf("rank %d: %s", rank, line.c_str()) : "");
  }

  void run() {
    std::vector<pollfd> list = {{wake[0], POLLIN, 0}};
    std::vector<int> ranks = {-1};
    for (size_t r = 0; r < star.watch_.size(); r++)
      if (star.watch_[r] >= 0) list.push_back({star.watch_[r], POLLIN, 0}), ranks.push_back(static_cast<int>(r));
    for (;;) {
      if (poll(list.data(), list.size(), -1) < 0) continue;
      if (list[0].revents) return;
      for (size_t i = 1; i < list.size(); i++)
        if (list[i].revents && !hear(ranks[i])) list[i].fd = -1;  // poll() skips it from now on
    }
  }
};

Star::Star(int rank, int ranks, double start_timeout_s, double reply_timeout_s)
    : rank_(rank),
      ranks_(ranks),
      start_timeout_s_(start_timeout_s),
      reply_timeout_s_(reply_timeout_s),
      data_(static_cast<size_t>(ranks), -1),
      watch_(data_),
      peers_(static_cast<size_t>(ranks)) {
  peers_[static_cast<size_t>(rank)] = {host_name(), getpid()};
}

Star::~Star() {
  watcher_.reset();
  for (const auto* sockets : {&data_, &watch_})
    for (const int fd : *sockets)
      if (fd >= 0) close(fd);
  if (listener_ >= 0) close(listener_);
}

std::string Star::name(int rank) const {
  std::lock_guard lock(names_);  // the watching thread asks too
  const Peer& peer = peers_[static_cast<size_t>(rank)];
  return peer.pid ? strf("rank %d (%s, process %d)", rank, peer.host.c_str(), peer.pid) : strf("rank %d", rank);
}

std::string Star::gone(int rank) const {
  return name(rank) + " is gone, and all ranks stop; its own output, if any, says why";
}

int Star::listen(int port) {
  listener_ = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool v6 = listener_ >= 0;
  if (!v6) listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1, off = 0;
  setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in6 any6{};
  sockaddr_in any4{};
  sockaddr* any = v6 ? reinterpret_cast<sockaddr*>(&any6) : reinterpret_cast<sockaddr*>(&any4);
  socklen_t size = v6 ? sizeof any6 : sizeof any4;
  if (v6) {
    setsockopt(listener_, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    any6.sin6_family = AF_INET6, any6.sin6_port = htons(static_cast<uint16_t>(port));
  } else {
    any4.sin_family = AF_INET, any4.sin_port = htons(static_cast<uint16_t>(port));
  }
  if (bind(listener_, any, size) || ::listen(listener_, 1024))
    RUN_ERROR(
        "rank 0 cannot listen on port %d: %s; another run or a second rank 0 may hold it, choose another "
        "MASTER_PORT",
        port, strerror(errno));
  getsockname(listener_, any, &size);
  return ntohs(v6 ? any6.sin6_port : any4.sin_port);
}

void Star::say_hello(int fd, char kind) {
  Hello hello;
  hello.rank = rank_, hello.ranks = ranks_, hello.pid = getpid(), hello.kind = kind;
  const std::string& host = peers_[static_cast<size_t>(rank_)].host;
  memcpy(hello.host, host.data(), std::min(host.size(), sizeof hello.host - 1));
  try_send(fd, &hello, sizeof hello);
}

// Rank 0: takes one connection. What does not say hello is a stranger, and no business of this run.
void Star::greet(int listener) {
  const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  if (fd < 0) return;
  Hello hello;
  set_timeout(fd, SO_RCVTIMEO, 5);
  if (try_receive(fd, &hello, sizeof hello) || hello.magic != hello_magic || (hello.kind != 'D' && hello.kind != 'W')) {
    close(fd);
    return;
  }
  hello.host[sizeof hello.host - 1] = 0;
  const auto refuse = [&](const std::string& line) {
    send_trouble(fd, 1, "");
    shutdown(fd, SHUT_WR);
    throw RunError(line);
  };
  const std::string who = strf("%s, process %d", hello.host, hello.pid);
  if (hello.ranks != ranks_)
    refuse(strf("%s says that there are %d ranks, rank 0 that there are %d; start all with one command", who.c_str(),
                hello.ranks, ranks_));
  if (hello.rank <= 0 || hello.rank >= ranks_)
    refuse(strf("%s calls itself rank %d, expected 1 to %d; give each rank a number of its own", who.c_str(),
                hello.rank, ranks_ - 1));
  const size_t r = static_cast<size_t>(hello.rank);
  if ((hello.kind == 'W' ? watch_ : data_)[r] >= 0)
    refuse(strf("two processes are rank %d: %s, process %d, and %s; give each rank a number of its own", hello.rank,
                peers_[r].host.c_str(), peers_[r].pid, who.c_str()));
  set_options(fd);
  set_timeout(fd, SO_RCVTIMEO, reply_timeout_s_), set_timeout(fd, SO_SNDTIMEO, reply_timeout_s_);
  (hello.kind == 'W' ? watch_ : data_)[r] = fd;
  peers_[r] = {hello.host, hello.pid};
}

void Star::connect(const std::vector<std::string>& addresses, int port) {
  const double until = now() + start_timeout_s_;
  if (rank_ == 0) {
    const auto missing = [&] {
      std::string list;
      for (size_t r = 1; r < data_.size(); r++)
        if (data_[r] < 0 || watch_[r] < 0) list += strf("%s%zu", list.empty() ? "" : ", ", r);
      return list;
    };
    for (std::string list; !(list = missing()).empty();) {
      pollfd waiting{listener_, POLLIN, 0};
      const double left = until - now();
      if (left <= 0)
        RUN_ERROR(
            "%d of %d ranks are there after %.0f s, missing: rank %s; did they start, and do they reach port %d "
            "of this machine (%s)?",
            ranks_ - static_cast<int>(std::count(list.begin(), list.end(), ',')) - 1, ranks_, start_timeout_s_,
            list.c_str(), port, peers_[0].host.c_str());
      if (poll(&waiting, 1, static_cast<int>(left * 1000) + 1) > 0) greet(listener_);
    }
    close(listener_);
    listener_ = -1;
  } else {
    std::string why = "no address";
    for (char kind : {'W', 'D'}) {
      int fd = -1;
      while (fd < 0) {
        for (size_t i = 0; i < addresses.size() && fd < 0; i++) fd = try_connect(addresses[i], port, &why);
        if (fd >= 0) break;
        if (now() > until)
          RUN_ERROR(
              "rank %d found no rank 0 at %s port %d in %.0f s: %s; does rank 0 run, and is MASTER_ADDR its "
              "machine?",
              rank_, addresses.empty() ? "?" : addresses[0].c_str(), port, start_timeout_s_, why.c_str());
        usleep(20000);
      }
      say_hello(fd, kind);
      set_options(fd);
      // A little longer than rank 0 waits, so that rank 0 is first to name the rank that keeps all waiting.
      set_timeout(fd, SO_RCVTIMEO, kind == 'D' ? std::max(start_timeout_s_, reply_timeout_s_) + 10 : 0);
      (kind == 'W' ? watch_ : data_)[0] = fd;
    }
  }
  watcher_ = std::make_unique<Watch>(*this);

  // Who they are, to all; for the others this is the sign that all are there.
  std::vector<Hello> table(peers_.size());
  for (size_t r = 0; r < peers_.size(); r++) {
    table[r].pid = peers_[r].pid;
    memcpy(table[r].host, peers_[r].host.data(), std::min(peers_[r].host.size(), sizeof table[r].host - 1));
  }
  const size_t bytes = table.size() * sizeof(Hello);
  if (rank_ == 0) {
    for (int r = 1; r < ranks_; r++) send_all(r, table.data(), bytes);
  } else {
    receive_all(0, table.data(), bytes);
    std::lock_guard lock(names_);
    for (size_t r = 0; r < peers_.size(); r++) peers_[r] = {table[r].host, table[r].pid};
  }
}

void Star::send_all(int rank, const void* data, size_t n) {
  const int error = try_send(data_[static_cast<size_t>(rank)], data, n);
  if (error == EAGAIN)
    RUN_ERROR("%s has read nothing for %.0f s; is it stopped?", name(rank).c_str(), reply_timeout_s_);
  if (error) throw RunError(gone(rank));
}
void Star::receive_all(int rank, void* data, size_t n) {
  const int error = try_receive(data_[static_cast<size_t>(rank)], data, n);
  if (error == EAGAIN)
    RUN_ERROR("%s has sent nothing for %.0f s; is it stopped?", name(rank).c_str(), reply_timeout_s_);
  if (error) throw RunError(gone(rank));
}

void Star::exchange(const std::vector<Bytes>& send, const std::vector<Bytes>& receive) {
  const size_t ranks = static_cast<size_t>(ranks_), me = static_cast<size_t>(rank_);
  const auto require = [&](size_t from, uint64_t found, size_t expected) {
    if (found != expected)
      RUN_ERROR(
          "%s sends %llu bytes where %zu are expected: the ranks do not do the same; do their flags and data "
          "agree?",
          name(static_cast<int>(from)).c_str(), static_cast<unsigned long long>(found), expected);
  };
  std::vector<uint64_t> sizes(ranks);
  if (rank_ != 0) {
    for (size_t r = 0; r < ranks; r++) sizes[r] = r == me ? 0 : send[r].n;
    send_all(0, sizes.data(), ranks * sizeof sizes[0]);
    for (size_t r = 0; r < ranks; r++) send_all(0, send[r].data, sizes[r]);
    receive_all(0, sizes.data(), ranks * sizeof sizes[0]);
    for (size_t r = 0; r < ranks; r++) {
      if (r == me) continue;
      require(r, sizes[r], receive[r].n);
      receive_all(0, receive[r].data, receive[r].n);
    }
    return;
  }
  // Rank 0 reads all that each rank sends, then hands it out.
  std::vector<std::vector<std::vector<char>>> box(ranks, std::vector<std::vector<char>>(ranks));  // [to][from]
  for (size_t from = 1; from < ranks; from++) {
    receive_all(static_cast<int>(from), sizes.data(), ranks * sizeof sizes[0]);
    require(from, sizes[0], receive[from].n);
    receive_all(static_cast<int>(from), receive[from].data, receive[from].n);
    for (size_t to = 1; to < ranks; to++) {
      if (sizes[to] > size_t{1} << 32) require(from, sizes[to], receive[from].n);
      box[to][from].resize(sizes[to]);
      receive_all(static_cast<int>(from), box[to][from].data(), box[to][from].size());
    }
  }
  for (size_t to = 1; to < ranks; to++) {
    for (size_t from = 0; from < ranks; from++) sizes[from] = from == 0 ? send[to].n : box[to][from].size();
    send_all(static_cast<int>(to), sizes.data(), ranks * sizeof sizes[0]);
    send_all(static_cast<int>(to), send[to].data, send[to].n);
    for (size_t from = 1; from < ranks; from++)
      send_all(static_cast<int>(to), box[to][from].data(), box[to][from].size());
  }
}

void Star::fail(int status, const std::string& line) {
  if (!watcher_) {  // not connected yet
    fprintf(stderr, "train_gpt: error: %s\n", line.c_str());
    for (const int fd : watch_)
      if (fd >= 0) send_trouble(fd, status, ""), shutdown(fd, SHUT_WR);
    usleep(100000);
    _exit(status);
  }
  if (rank_ == 0) watcher_->end(status, line);
  send_trouble(watch_[0], status, line);
  sleep(20);  // rank 0 prints the line and ends this process through the watcher
  watcher_->end(status, strf("rank %d: %s", rank_, line.c_str()));
}

void Star::leave() {
  // Nobody goes before all have come here.
  std::vector<char> in(static_cast<size_t>(ranks_)), out = in;
  std::vector<Bytes> send, receive;
  for (size_t r = 0; r < in.size(); r++) send.push_back({&out[r], 1}), receive.push_back({&in[r], 1});
  exchange(send, receive);
  watcher_->leaving = true;
  for (const int fd : watch_)
    if (fd >= 0) try_send(fd, "B", 1);
  watcher_.reset();
}
