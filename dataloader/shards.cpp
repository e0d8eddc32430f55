#include "dataloader/shards.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "runtime/error.h"

static_assert(std::endian::native == std::endian::little, "shards are little endian");

constexpr int64_t kHeaderBytes = 256 * 4;
constexpr const char* kHint = "python3 scripts/prepare_data.py makes shards from text";

Shard::Shard(const std::string& path, const std::string& who)
    : path_(path), file_(path, who + ": " + printable(path)) {
  const std::string where = who + ": " + printable(path);
  int32_t header[256] = {};
  const int64_t bytes = file_.size(), got = std::min(bytes, kHeaderBytes);
  if (got > 0) memcpy(header, file_.data(), static_cast<size_t>(got));
  const std::string start = first_bytes(header, got);
  const bool narrow = header[0] == 20240520, wide = header[0] == 20240801;
  if (got < 4 || (!narrow && !wide)) {
    RUN_ERROR("%s: not a token shard: %lld bytes, %s; expected magic 20240520 (88 d8 34 01) or 20240801 (a1 d9 34 01); "
              "%s", where.c_str(), static_cast<long long>(bytes), start.c_str(), kHint);
  }
  if (got < kHeaderBytes) {
    RUN_ERROR("%s: cut short: %lld bytes, expected a header of 1024 and tokens; %s", where.c_str(),
              static_cast<long long>(bytes), kHint);
  }
  if (header[1] != (narrow ? 1 : 7)) {
    RUN_ERROR("%s: version %d of the shard format, expected %d for magic %d; %s", where.c_str(), header[1],
              narrow ? 1 : 7, header[0], kHint);
  }
  token_bytes_ = narrow ? 2 : 4;
  tokens_ = header[2];
  if (tokens_ <= 0) {
    RUN_ERROR("%s: its header states %lld tokens, its %lld bytes hold %lld; expected at least 1; %s", where.c_str(),
              static_cast<long long>(tokens_), static_cast<long long>(bytes),
              static_cast<long long>((bytes - kHeaderBytes) / token_bytes_), kHint);
  }
  const int64_t expected = kHeaderBytes + tokens_ * token_bytes_;
  if (bytes != expected) {
    RUN_ERROR("%s: %s: %lld bytes, but its header states %lld tokens of %d bytes, which makes %lld; copy it again, or "
              "make it anew: %s", where.c_str(), bytes < expected ? "cut short" : "too long",
              static_cast<long long>(bytes), static_cast<long long>(tokens_), token_bytes_,
              static_cast<long long>(expected), kHint);
  }
  vocab_size_ = header[3];
  if (vocab_size_ < 0) {
    RUN_ERROR("%s: its header states a vocabulary of %lld, expected 0 (unknown) or more; %s", where.c_str(),
              static_cast<long long>(vocab_size_), kHint);
  }
  tokenizer_crc_ = static_cast<uint32_t>(header[4]);
}

// The largest of n ids: an integer maximum, which compilers vectorise.
template <typename Id>
static Id largest(const Id* ids, int64_t n) {
  Id most = 0;
  for (int64_t i = 0; i < n; i++) most = ids[i] > most ? ids[i] : most;
  return most;
}

// Where a file has no data on disk, as far as its file system tells.
class Holes {
 public:
  explicit Holes(const std::string& path) : fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
  ~Holes() {
    if (fd_ >= 0) close(fd_);
  }
  Holes(const Holes&) = delete;
  // The first place from here on that may hold data.
  int64_t next_data(int64_t from) const {
    const off_t at = fd_ >= 0 ? lseek(fd_, from, SEEK_DATA) : from;
    if (at >= 0) return at;
    return errno == ENXIO ? INT64_MAX : from;  // ENXIO: a hole up to the end
  }

 private:
  int fd_;
};

template <typename Id>
static void check_ids(const Shard& shard, const char* map, int64_t vocab_size, const std::string& who) {
  const auto* ids = reinterpret_cast<const Id*>(map + kHeaderBytes);
  // In pieces that are let go again (the file stays in the page cache), so that a check of a shard larger than the
  // memory does not push the run's own memory out. A piece starts on a page: the header is a part of the first one.
  constexpr int64_t kPiece = int64_t{1} << 25, kPage = int64_t{1} << 16;
  const int64_t bytes = kHeaderBytes + shard.tokens() * static_cast<int64_t>(sizeof(Id));
  // Holes of a sparse file read as zeros, which are below any vocabulary: skipped, they cost no memory and no time.
  const Holes holes(shard.path());
  for (int64_t begin = 0; begin < bytes; begin += kPiece) {
    begin = holes.next_data(begin) / kPage * kPage;
    if (begin >= bytes) break;
    const int64_t end = std::min(bytes, begin + kPiece);
    char* piece = const_cast<char*>(map) + begin;
    madvise(piece, static_cast<size_t>(end - begin), MADV_WILLNEED);
#ifdef MADV_POPULATE_READ
    madvise(piece, static_cast<size_t>(end - begin), MADV_POPULATE_READ);  // one call instead of a fault every 16 pages
#endif
    const int64_t first = (std::max(begin, kHeaderBytes) - kHeaderBytes) / static_cast<int64_t>(sizeof(Id));
    const int64_t last = (end - kHeaderBytes) / static_cast<int64_t>(sizeof(Id));
    if (largest(ids + first, last - first) >= vocab_size) {
      int64_t i = first;
      while (ids[i] < vocab_size) i++;
      RUN_ERROR("%s: %s: token %lld (byte %lld) is %llu, expected ids below the vocabulary of %lld (--vocab-size); "
                "was the shard made with another tokenizer?", who.c_str(), printable(shard.path()).c_str(),
                static_cast<long long>(i), static_cast<long long>(kHeaderBytes + i * sizeof(Id)),
                static_cast<unsigned long long>(ids[i]), static_cast<long long>(vocab_size));
    }
    madvise(piece, static_cast<size_t>(end - begin), MADV_DONTNEED);
  }
}

void Shard::check_tokens(int64_t vocab_size, const std::string& who) const {
  if (token_bytes_ == 2) check_ids<uint16_t>(*this, file_.data(), vocab_size, who);
  else check_ids<uint32_t>(*this, file_.data(), vocab_size, who);
}

template <typename Id>
static void widen(const char* ids, int64_t n, int32_t* out) {
  const auto* p = reinterpret_cast<const Id*>(ids);
  for (int64_t i = 0; i < n; i++) out[i] = static_cast<int32_t>(p[i]);
}

void Shard::copy(int64_t first, int64_t n, int32_t* out) const {
  CHECK(first >= 0 && n >= 0 && first + n <= tokens_, "%s: tokens %lld..%lld of %lld", path_.c_str(),
        static_cast<long long>(first), static_cast<long long>(first + n), static_cast<long long>(tokens_));
  const char* ids = file_.data() + kHeaderBytes + first * token_bytes_;
  if (token_bytes_ == 2) widen<uint16_t>(ids, n, out);
  else widen<uint32_t>(ids, n, out);
}
