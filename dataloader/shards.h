// One shard: a file of token ids in llm.c's format, memory-mapped.
//
//   256 int32, little endian: magic, version, number of tokens, vocabulary size or 0, CRC-32 of the tokenizer file
//   or 0, zeros;
//   then the ids, uint16 (magic 20240520, version 1) or uint32 (magic 20240801, version 7)
//
// llm.c itself writes and reads the first three words only, so its shards and these can be exchanged.
#pragma once
#include <cstdint>
#include <string>

#include "dataloader/file.h"

class Shard {
 public:
  // Maps the file and checks its header against its size. who: what messages begin with, the flag that named the file.
  Shard(const std::string& path, const std::string& who);

  const std::string& path() const { return path_; }
  int64_t tokens() const { return tokens_; }
  int64_t vocab_size() const { return vocab_size_; }       // 0: the file does not say
  uint32_t tokenizer_crc() const { return tokenizer_crc_; }  // 0: the file does not say

  // Throws RunError naming the first id that is not below vocab_size. Reads the whole file, at memory speed.
  void check_tokens(int64_t vocab_size, const std::string& who) const;

  // Ids first .. first + n - 1, which must exist.
  void copy(int64_t first, int64_t n, int32_t* out) const;

 private:
  std::string path_;
  MappedFile file_;
  int64_t tokens_ = 0;
  int token_bytes_ = 2;
  int64_t vocab_size_ = 0;
  uint32_t tokenizer_crc_ = 0;
};
