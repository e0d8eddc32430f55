#include "runtime/comm.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <omp.h>
#include <sched.h>

#include <cstdlib>
#include <cstring>

#include "runtime/comm_mpi.h"
#include "runtime/comm_nccl.h"
#include "runtime/error.h"
#include "runtime/launch.h"

namespace {

// Where rank 0 listens, as MPI tells the others.
struct Address {
  int port;
  int count;
  char ip[8][INET_ADDRSTRLEN];
};

// This machine's IPv4 addresses: the loopback one first, which only the ranks beside rank 0 reach.
Address own_address(int port) {
  Address a{};
  a.port = port;
  strcpy(a.ip[a.count++], "127.0.0.1");
  ifaddrs* list = nullptr;
  if (getifaddrs(&list)) return a;
  for (const ifaddrs* i = list; i && a.count < 8; i = i->ifa_next) {
    if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET || (i->ifa_flags & IFF_LOOPBACK)) continue;
    inet_ntop(AF_INET, &reinterpret_cast<sockaddr_in*>(i->ifa_addr)->sin_addr, a.ip[a.count++], INET_ADDRSTRLEN);
  }
  freeifaddrs(list);
  return a;
}

// Seconds that ranks wait for each other, by TRAIN_GPT_TIMEOUT or else this default.
double timeout(double otherwise) {
  const char* text = getenv("TRAIN_GPT_TIMEOUT");
  if (!text || !*text) return otherwise;
  char* end;
  const double seconds = strtod(text, &end);
  if (*end || !(seconds >= 1 && seconds <= 1e6))
    USAGE_ERROR("TRAIN_GPT_TIMEOUT: found '%.80s' in the environment, expected seconds from 1 to 1e6", text);
  return seconds;
}

}  // namespace

Comm::Comm() = default;
Comm::~Comm() = default;

void Comm::join() {
  const Launch launch = detect_launch();
  if (launch.ranks == 1) return;
  rank_ = launch.rank, ranks_ = launch.ranks;
  if (rank_ != 0 && !freopen("/dev/null", "w", stdout)) RUN_ERROR("cannot open /dev/null");
  // Ranks of a large job start minutes apart. Between replies lie a rank's checkpoint, or rank 0's sample.
  const double start_timeout_s = timeout(300);
  reply_timeout_s_ = timeout(900);
  star_ = std::make_unique<Star>(rank_, ranks_, start_timeout_s, reply_timeout_s_);

  const bool has_master = launch.master_port != 0;
  if (Mpi::available() && (launch.by == "mpirun" || (launch.by == "srun" && !has_master))) {
    mpi_ = std::make_unique<Mpi>();
    if (mpi_->ranks() != ranks_ || mpi_->rank() != rank_)
      RUN_ERROR("%s started %d ranks and MPI knows of %d: it is another MPI than this program is linked with; %s",
                launch.by.c_str(), ranks_, mpi_->ranks(),
                launch.by == "srun" ? "use srun --mpi=pmix, or set MASTER_ADDR and MASTER_PORT" : "use its mpirun");
  } else if (!has_master) {
    RUN_ERROR(
        "%s started %d ranks, but this build has no MPI; build it with MPI, or set MASTER_ADDR and MASTER_PORT to "
        "where rank 0 shall listen",
        launch.by.c_str(), ranks_);
  }
  std::vector<std::string> addresses = {launch.master_address};
  int port = launch.master_port;
  if (rank_ == 0) port = star_->listen(port);
  if (!has_master) {
    Address address = own_address(port);
    mpi_->broadcast(&address, sizeof address);
    port = address.port;
    addresses.assign(address.ip, address.ip + address.count);
  }
  star_->connect(addresses, port);

  const auto& peers = star_->peers();
  const std::string& host = peers[static_cast<size_t>(rank_)].host;
  // Ranks that a launcher has bound to cores of their own have different masks.
  cpu_set_t cores;
  CPU_ZERO(&cores);
  sched_getaffinity(0, sizeof cores, &cores);
  const std::vector<cpu_set_t> masks = gather(cores);
  local_ranks_ = sharing_cores_ = 0;
  for (int r = 0; r < ranks_; r++) {
    if (peers[static_cast<size_t>(r)].host != host) continue;
    if (r < rank_) local_rank_++;
    local_ranks_++;
    sharing_cores_ += CPU_EQUAL(&masks[static_cast<size_t>(r)], &cores) ? 1 : 0;
  }
  if (launch.local_rank >= 0) local_rank_ = launch.local_rank;
}

int Comm::fail(int status, const std::string& line) {
  if (star_) star_->fail(status, line);
  // join() had no star yet: all ranks have found the same, or MPI's launcher ends the others.
  fprintf(stderr, "train_gpt: error: %s\n", line.c_str());
  return status;
}

void Comm::leave() {
  if (!star_) return;
  nccl_.reset();
  star_->leave();
  mpi_.reset();
  star_.reset();
}

std::string Comm::transport() const { return nccl_ ? Nccl::version() : mpi_ ? "MPI" : "TCP"; }

int Comm::threads(int flag) const {
  if (flag > 0 || ranks_ == 1 || getenv("OMP_NUM_THREADS")) return flag;
  return std::max(1, omp_get_num_procs() / sharing_cores_);
}

std::vector<std::string> Comm::gather_text(const std::string& mine) {
  std::vector<size_t> first = {0};
  for (const uint64_t n : gather(static_cast<uint64_t>(mine.size()))) first.push_back(first.back() + n);
  std::string all(first.back(), ' ');
  all.replace(first[static_cast<size_t>(rank_)], mine.size(), mine);
  share(all.data(), first);
  std::vector<std::string> texts;
  for (size_t r = 0; r + 1 < first.size(); r++) texts.push_back(all.substr(first[r], first[r + 1] - first[r]));
  return texts;
}

void Comm::require_same(const char* what, const std::string& mine) {
  const std::vector<std::string> texts = gather_text(mine);
  if (rank_ != 0) return;
  for (size_t r = 1; r < texts.size(); r++) {
    if (texts[r] == texts[0]) continue;
    const size_t at = static_cast<size_t>(
        std::mismatch(texts[0].begin(), texts[0].end(), texts[r].begin(), texts[r].end()).first - texts[0].begin());
    const size_t from = at > 20 ? at - 20 : 0;
    RUN_ERROR("%s has other %s than rank 0: ...%s... against ...%s...; start all ranks with one command",
              star_->name(static_cast<int>(r)).c_str(), what,
              texts[r].substr(std::min(from, texts[r].size()), 60).c_str(), texts[0].substr(from, 60).c_str());
  }
}

std::string duplicate_device(const std::vector<std::string>& ids, const std::vector<std::string>& texts) {
  for (size_t b = 0; b < ids.size(); b++)
    for (size_t a = 0; a < b; a++)
      if (!ids[a].empty() && ids[a] == ids[b])
        return strf(
            "ranks %zu and %zu both use %s; start one rank a GPU, or let CUDA_VISIBLE_DEVICES give each its own", a, b,
            texts[b].c_str());
  return "";
}

std::vector<std::string> Comm::list_devices(const std::string& id, const std::string& text) {
  std::vector<std::string> lines;
  const std::vector<std::string> ids = gather_text(id), texts = gather_text(text);
  if (ranks_ == 1) return lines;
  if (const std::string line = duplicate_device(ids, texts); !line.empty() && rank_ == 0) throw RunError(line);
  const auto said = [&](size_t r) { return star_->peers()[r].host + ": " + texts[r]; };
  for (size_t r = 0, end; r < texts.size(); r = end) {
    for (end = r + 1; end < texts.size() && said(end) == said(r);) end++;
    lines.push_back((end == r + 1 ? strf("rank %zu on ", r) : strf("ranks %zu-%zu on ", r, end - 1)) + said(r));
  }
  return lines;
}

void Comm::use_gpu(CUstream_st* compute) {
  if (ranks_ == 1) return;
  if (!Nccl::available())
    RUN_ERROR("%d ranks on GPUs need NCCL, and this build has none; build it with NCCL, or use --device=cpu", ranks_);
  const Nccl::Id id = gather(rank_ == 0 ? Nccl::make_id() : Nccl::Id{})[0];
  nccl_ = std::make_unique<Nccl>(id, rank_, ranks_, compute);
}

void Comm::wait() {
  if (nccl_) nccl_->wait();
}

void Comm::reduce_scatter_gpu(void* grads, size_t element, size_t begin, size_t end, const std::vector<size_t>& first) {
  nccl_->reduce_scatter(grads, element, begin, end, first);
}

void Comm::exchange(const std::vector<Bytes>& send, const std::vector<Bytes>& receive) {
  if (!mpi_) return star_->exchange(send, receive);
  if (const int late = mpi_->exchange(send, receive, reply_timeout_s_); late >= 0)
    RUN_ERROR("%s has sent nothing for %.0f s; is it stopped?", star_->name(late).c_str(), reply_timeout_s_);
}

void Comm::all_gather_bytes(void* data, size_t element, const std::vector<size_t>& first, bool small) {
  if (ranks_ == 1) return;
  if (nccl_ && !small) return nccl_->all_gather(data, element, first);
  constexpr size_t chunk = size_t{16} << 20;
  const size_t ranks = static_cast<size_t>(ranks_);
  for (size_t done = 0, rest = 1; rest; done += chunk) {
    std::vector<Bytes> send(ranks), receive(ranks);
    rest = 0;
    for (size_t r = 0; r < ranks; r++) {
      const size_t bytes = (first[r + 1] - first[r]) * element, from = std::min(done, bytes);
      receive[r] = {static_cast<char*>(data) + first[r] * element + from, std::min(chunk, bytes - from)};
      rest += bytes - from - receive[r].n;
    }
    for (size_t r = 0; r < ranks; r++) send[r] = receive[static_cast<size_t>(rank_)];
    small ? star_->exchange(send, receive) : exchange(send, receive);
  }
}
