#include "dataloader/tokenizer.h"

#include <algorithm>
#include <cstring>

#include "dataloader/file.h"
#include "runtime/crc32.h"
#include "runtime/error.h"

constexpr int64_t kHeaderBytes = 256 * 4;
constexpr uint32_t kMagic = 20240328, kEotOfVersion1 = 50256;
constexpr uint32_t kMostTokens = 1 << 24;  // far above any tokenizer in use; bounds what a hostile header can ask for
constexpr const char* kHint = "python3 scripts/prepare_data.py makes one beside its shards";

Tokenizer::Tokenizer(const std::string& path) : path_(path) {
  const std::string where = printable(path);
  const File file(path, where);
  uint32_t header[256] = {};
  const int64_t got = file.read(header, kHeaderBytes, where);
  if (got < 4 || header[0] != kMagic) {
    RUN_ERROR("%s: not a tokenizer file: %lld bytes, %s; expected magic %u (c8 d7 34 01); %s", where.c_str(),
              static_cast<long long>(file.size()), first_bytes(header, got).c_str(), kMagic, kHint);
  }
  if (got < kHeaderBytes) {
    RUN_ERROR("%s: cut short: %lld bytes, expected a header of 1024 and tokens; %s", where.c_str(),
              static_cast<long long>(file.size()), kHint);
  }
  const uint32_t version = header[1], V = header[2], eot = version == 1 ? kEotOfVersion1 : header[3];
  if (version != 1 && version != 2) {
    RUN_ERROR("%s: version %u of the tokenizer format, expected 1 or 2; %s", where.c_str(), version, kHint);
  }
  if (V == 0 || V > kMostTokens || eot >= V) {
    RUN_ERROR("%s: its header states %u tokens and end-of-text %u, expected 1 to %u tokens and end-of-text below; %s",
              where.c_str(), V, eot, kMostTokens, kHint);
  }
  // A token takes 2 to 256 bytes, so the size alone tells many defects before anything is allocated.
  const int64_t least = kHeaderBytes + int64_t{2} * V, most = kHeaderBytes + int64_t{256} * V;
  if (file.size() < least || file.size() > most) {
    RUN_ERROR("%s: %lld bytes, but its header states %u tokens, which makes %lld to %lld; %s", where.c_str(),
              static_cast<long long>(file.size()), V, static_cast<long long>(least), static_cast<long long>(most),
              kHint);
  }
  file_.resize(static_cast<size_t>(file.size()));
  file_.resize(static_cast<size_t>(file.read(file_.data(), file.size(), where)));

  tokens_.reserve(V);
  size_t at = kHeaderBytes;
  for (uint32_t id = 0; id < V; id++) {
    const size_t length = at < file_.size() ? static_cast<unsigned char>(file_[at]) : 0;
    if (at >= file_.size() || length > file_.size() - at - 1) {
      RUN_ERROR("%s: cut short: its %zu bytes end within token %u of %u; %s", where.c_str(), file_.size(), id, V,
                kHint);
    }
    if (length == 0) RUN_ERROR("%s: token %u has no bytes, expected 1 to 255; %s", where.c_str(), id, kHint);
    tokens_.emplace_back(file_.data() + at + 1, length);
    ids_.emplace(tokens_.back(), static_cast<int32_t>(id));
    longest_ = std::max(longest_, length);
    at += 1 + length;
  }
  if (at != file_.size()) {
    RUN_ERROR("%s: too long: %zu bytes, but its %u tokens end at %zu; %s", where.c_str(), file_.size(), V, at, kHint);
  }
  eot_ = static_cast<int32_t>(eot);
  crc_ = crc32(file_.data(), file_.size());
}

std::string_view Tokenizer::decode(int32_t id) const {
  return id >= 0 && id < vocab_size() ? tokens_[static_cast<size_t>(id)] : std::string_view();
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> ids;
  size_t at = 0;
  while (at < text.size()) {
    auto found = ids_.end();
    for (size_t n = std::min(longest_, text.size() - at); n > 0 && found == ids_.end(); n--) {
      found = ids_.find(text.substr(at, n));
    }
    if (found == ids_.end()) {
      USAGE_ERROR("--prompt: byte %zu, 0x%02x, is in no token of %s; expected text that its %d tokens can spell",
                  at + 1, static_cast<unsigned char>(text[at]), printable(path_).c_str(), vocab_size());
    }
    ids.push_back(found->second);
    at += found->first.size();
  }
  return ids;
}

void Tokenizer::require_made(int64_t vocab_size, uint32_t crc, const std::string& shards) const {
  if (crc != 0 && crc != crc_) {
    RUN_ERROR("%s: the shards were made with tokenizer %08x, %s is %08x (CRC-32); expected the file beside them",
              shards.c_str(), crc, printable(path_).c_str(), crc_);
  }
  if (vocab_size != 0 && vocab_size != this->vocab_size()) {
    RUN_ERROR("%s: the shards state a vocabulary of %lld, %s has %d tokens; expected the file beside them",
              shards.c_str(), static_cast<long long>(vocab_size), printable(path_).c_str(), this->vocab_size());
  }
}
