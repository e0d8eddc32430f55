#include "dataloader/dataset.h"

#include <glob.h>
#include <sys/stat.h>

#include <algorithm>

#include "dataloader/file.h"
#include "runtime/crc32.h"
#include "runtime/error.h"
#include "runtime/random.h"

// Keys that keep the two shuffles' random numbers apart, and both apart from other users of the seed.
constexpr uint64_t kShardOrder = 0x7368617264730001u, kSequenceOrder = 0x7368617264730002u;

static long long ll(int64_t x) { return static_cast<long long>(x); }

static bool exists(const std::string& path) {
  struct stat st;
  return stat(path.c_str(), &st) == 0;
}

// The files that a glob names, sorted by their bytes, whatever the locale.
static std::vector<std::string> expand(const std::string& pattern, const std::string& who) {
  const std::string shown = printable(pattern);
  if (pattern.empty()) {
    RUN_ERROR("%s: empty, expected a shard's path or a glob such as 'data/kjv/train_*.bin'", who.c_str());
  }
  std::vector<std::string> paths;
  if (exists(pattern)) {  // a plain path, even where its name has a bracket or a star
    paths.push_back(pattern);
  } else {
    glob_t found = {};
    const int rc = glob(pattern.c_str(), GLOB_NOSORT | GLOB_BRACE | GLOB_TILDE, nullptr, &found);
    for (size_t i = 0; rc == 0 && i < found.gl_pathc; i++) paths.push_back(found.gl_pathv[i]);
    globfree(&found);
    if (rc != 0 && rc != GLOB_NOMATCH) {
      RUN_ERROR("%s: '%s' cannot be expanded: a folder in it cannot be read", who.c_str(), shown.c_str());
    }
  }
  if (paths.empty()) {
    RUN_ERROR("%s: no file matches '%s'; python3 scripts/prepare_data.py kjv makes data/kjv/train_*.bin and val_*.bin",
              who.c_str(), shown.c_str());
  }
  struct stat st;
  if (paths.size() == 1 && stat(paths[0].c_str(), &st) == 0 && S_ISDIR(st.st_mode)) {
    RUN_ERROR("%s: '%s' is a folder, expected files; did you mean '%s/*.bin'?", who.c_str(), shown.c_str(),
              shown.c_str());
  }
  std::sort(paths.begin(), paths.end());
  paths.erase(std::unique(paths.begin(), paths.end()), paths.end());
  return paths;
}

Dataset::Dataset(const std::string& glob, int T, const char* flag_name) : flag_name_(flag_name), T_(T) {
  CHECK(T >= 1, "T = %d", T);
  first_sequence_.push_back(0);
  int64_t longest = 0;
  // Which shard stated them first, for the message that says who disagrees.
  const Shard* vocab_from = nullptr;
  const Shard* crc_from = nullptr;
  const std::vector<std::string> paths = expand(glob, flag_name_);
  shards_.reserve(paths.size());  // so that vocab_from and crc_from stay valid
  for (const std::string& path : paths) {
    shards_.emplace_back(path, flag_name_);
    const Shard& shard = shards_.back();
    const int64_t n = shard.tokens(), sequences = (n - 1) / T_;
    first_sequence_.push_back(first_sequence_.back() + sequences);
    tokens_ += n;
    dropped_tokens_ += sequences > 0 ? n - (sequences * T_ + 1) : n;
    longest = std::max(longest, n);
    if (shard.vocab_size() != 0) {
      if (vocab_from && vocab_size_ != shard.vocab_size()) {
        RUN_ERROR("%s: shards disagree: %s states a vocabulary of %lld, %s of %lld; expected one tokenizer for all",
                  flag_name_.c_str(), printable(vocab_from->path()).c_str(), ll(vocab_size_), printable(path).c_str(),
                  ll(shard.vocab_size()));
      }
      vocab_from = &shard;
      vocab_size_ = shard.vocab_size();
    }
    if (shard.tokenizer_crc() != 0) {
      if (crc_from && tokenizer_crc_ != shard.tokenizer_crc()) {
        RUN_ERROR("%s: shards disagree: %s was made with tokenizer %08x, %s with %08x (CRC-32); expected one for all",
                  flag_name_.c_str(), printable(crc_from->path()).c_str(), tokenizer_crc_, printable(path).c_str(),
                  shard.tokenizer_crc());
      }
      crc_from = &shard;
      tokenizer_crc_ = shard.tokenizer_crc();
    }
  }
  if (sequences() == 0) {
    const std::string what = shards_.size() == 1
        ? printable(paths[0]) + strf(" holds %lld token%s", ll(longest), longest == 1 ? "" : "s")
        : strf("the longest of the %zu shards of '%s' holds %lld tokens", shards_.size(), printable(glob).c_str(),
               ll(longest));
    const std::string hint = longest > 1 ? strf("--seq-len=%lld would fit", ll(longest - 1)) : "more text is needed";
    RUN_ERROR("%s: %s, too few for one sequence: --seq-len=%lld needs %lld; %s", flag_name_.c_str(), what.c_str(),
              ll(T_), ll(T_ + 1), hint.c_str());
  }
  checked_.assign(shards_.size(), false);
}

std::string Dataset::identity() const {
  uint32_t crc = 0;
  for (const Shard& shard : shards_) {
    const int64_t n = shard.tokens(), count = std::min<int64_t>(n, 1024);
    crc = crc32(&n, sizeof n, crc);
    std::vector<int32_t> ids(static_cast<size_t>(count));
    constexpr int samples = 16;
    for (int i = 0; i < samples; i++) {
      shard.copy((n - count) * i / (samples - 1), count, ids.data());
      crc = crc32(ids.data(), ids.size() * sizeof ids[0], crc);
    }
  }
  return strf("%lld shard%s, %lld tokens, CRC-32 %08x", ll(shards()), shards() == 1 ? "" : "s", ll(tokens()), crc);
}

std::string Dataset::tokenizer_path() const {
  const std::string& first = shards_[0].path();
  const size_t slash = first.rfind('/');
  const std::string path = (slash == std::string::npos ? "" : first.substr(0, slash + 1)) + "tokenizer.bin";
  return exists(path) ? path : "";
}

void Dataset::set_vocab_size(int64_t vocab_size) {
  CHECK(vocab_size >= 1 && vocab_size <= INT32_MAX, "vocab_size = %lld", ll(vocab_size));
  if (vocab_size_ > vocab_size) {
    RUN_ERROR("%s: %s was made for a vocabulary of %lld, the model has %lld; give --vocab-size=%lld or other data",
              flag_name_.c_str(), printable(shards_[0].path()).c_str(), ll(vocab_size_), ll(vocab_size),
              ll(vocab_size_));
  }
  if (vocab_size < vocab_limit_) checked_.assign(shards_.size(), false);
  vocab_limit_ = vocab_size;
}

void Dataset::require_same_tokens(const Dataset& other) const {
  if (vocab_size_ != 0 && other.vocab_size_ != 0 && vocab_size_ != other.vocab_size_) {
    RUN_ERROR("%s and %s disagree: a vocabulary of %lld and of %lld; expected shards of one tokenizer",
              flag_name_.c_str(), other.flag_name_.c_str(), ll(vocab_size_), ll(other.vocab_size_));
  }
  if (tokenizer_crc_ != 0 && other.tokenizer_crc_ != 0 && tokenizer_crc_ != other.tokenizer_crc_) {
    RUN_ERROR("%s and %s disagree: tokenizer %08x and %08x (CRC-32); expected shards of one tokenizer",
              flag_name_.c_str(), other.flag_name_.c_str(), tokenizer_crc_, other.tokenizer_crc_);
  }
}

void Dataset::read_from(size_t shard, int64_t sequence, int32_t* out) {
  if (!checked_[shard]) {
    CHECK(vocab_limit_ > 0, "set_vocab_size comes before the first read");
    shards_[shard].check_tokens(vocab_limit_, flag_name_);
    checked_[shard] = true;
  }
  shards_[shard].copy(sequence * T_, T_ + 1, out);
}

// The place in `first`, sequences before each shard, whose shard holds sequence i; shards without sequences hold none.
static size_t find(const std::vector<int64_t>& first, int64_t i) {
  return static_cast<size_t>(std::upper_bound(first.begin(), first.end(), i) - first.begin()) - 1;
}

void Dataset::read(int64_t i, int32_t* out) {
  CHECK(i >= 0 && i < sequences(), "sequence %lld of %lld", ll(i), ll(sequences()));
  const size_t shard = find(first_sequence_, i);
  read_from(shard, i - first_sequence_[shard], out);
}

void Dataset::order_epoch(uint64_t seed, uint64_t epoch) {
  if (ordered_ && order_seed_ == seed && order_epoch_ == epoch) return;
  const uint64_t key = random_bits(seed, epoch, kShardOrder), n = shards_.size();
  order_.resize(n);
  order_first_.assign(1, 0);
  for (uint64_t k = 0; k < n; k++) {
    const size_t shard = random_permutation(k, n, key);
    order_[k] = shard;
    order_first_.push_back(order_first_.back() + first_sequence_[shard + 1] - first_sequence_[shard]);
  }
  ordered_ = true;
  order_seed_ = seed;
  order_epoch_ = epoch;
}

void Dataset::read_shuffled(int64_t i, uint64_t seed, int32_t* out) {
  CHECK(i >= 0, "position %lld", ll(i));
  const uint64_t epoch = static_cast<uint64_t>(i / sequences());
  order_epoch(seed, epoch);
  const int64_t within = i % sequences();
  const size_t place = find(order_first_, within), shard = order_[place];
  const uint64_t n = static_cast<uint64_t>(first_sequence_[shard + 1] - first_sequence_[shard]);
  const uint64_t k = static_cast<uint64_t>(within - order_first_[place]);
  const uint64_t key = random_bits(seed, epoch, kSequenceOrder, shard);
  read_from(shard, static_cast<int64_t>(random_permutation(k, n, key)), out);
}
