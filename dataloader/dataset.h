// A data set: the shards that a glob names, cut into sequences of T inputs, and the order in which a run sees them.
//
// Sequence k of a shard is the ids k*T .. k*T + T: T inputs, and the same shifted by one as targets. Sequences do not
// overlap but for that one id. What is left at the end of a shard is never seen (dropped_tokens).
//
// The order is a pure function of (seed, position): no state to checkpoint, and any rank can take any slice of it.
// It is shuffled over the shards, and within each shard, so that reading stays within one file at a time.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "dataloader/shards.h"

class Dataset {
 public:
  // Opens every file that matches the glob, in the order of their names, and checks the headers. flag_name, e.g.
  // "--train-data", is what error messages begin with. Throws RunError: no file, a defective one, shards that disagree
  // on vocabulary or tokenizer, or not one sequence of T + 1 tokens in all of them.
  Dataset(const std::string& glob, int T, const char* flag_name);

  int64_t sequences() const { return first_sequence_.back(); }
  int64_t tokens() const { return tokens_; }
  int64_t dropped_tokens() const { return dropped_tokens_; }
  int64_t shards() const { return static_cast<int64_t>(shards_.size()); }
  const std::string& path(int64_t shard) const { return shards_[static_cast<size_t>(shard)].path(); }
  int64_t vocab_size() const { return vocab_size_; }         // 0: no shard states one
  uint32_t tokenizer_crc() const { return tokenizer_crc_; }  // 0: no shard states one
  // What makes two data sets the same to a run, wherever they lie: "2 shards, 1234 tokens, CRC-32 0123abcd" of their
  // lengths and of samples of their ids. Reads a few pages of each.
  std::string identity() const;
  // tokenizer.bin in the folder of the first shard if that file exists, else "".
  std::string tokenizer_path() const;

  // The model's vocabulary, before the first read. Ids are checked against it when a shard is first read. Throws
  // RunError if the shards state a larger one.
  void set_vocab_size(int64_t vocab_size);
  // Throws RunError if both data sets state a vocabulary or a tokenizer, and not the same.
  void require_same_tokens(const Dataset& other) const;

  // The T + 1 ids of sequence i, 0 <= i < sequences(), in file order: for validation.
  // Throws RunError where the shard, read for the first time, holds an id outside the vocabulary. Not thread-safe.
  void read(int64_t i, int32_t* out);
  // The T + 1 ids at position i >= 0 of the endless shuffled stream; epoch i / sequences() has an order of its own.
  void read_shuffled(int64_t i, uint64_t seed, int32_t* out);

 private:
  void read_from(size_t shard, int64_t sequence, int32_t* out);
  void order_epoch(uint64_t seed, uint64_t epoch);

  std::string flag_name_;
  int64_t T_;
  std::vector<Shard> shards_;
  std::vector<int64_t> first_sequence_;  // (shards + 1) sequences before each shard, in file order
  std::vector<bool> checked_;            // (shards) ids known to be below vocab_limit_
  int64_t tokens_ = 0;
  int64_t dropped_tokens_ = 0;
  int64_t vocab_size_ = 0;
  uint32_t tokenizer_crc_ = 0;
  int64_t vocab_limit_ = 0;  // what set_vocab_size was given, 0: not yet

  // The order of the shards in the epoch that was read last: a cache, no state.
  bool ordered_ = false;
  uint64_t order_seed_ = 0, order_epoch_ = 0;
  std::vector<size_t> order_;         // (shards)
  std::vector<int64_t> order_first_;  // (shards + 1) sequences before each, in this order
};
