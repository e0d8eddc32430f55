// Token ids to text and back, from llm.c's tokenizer file.
//
//   256 uint32, little endian: magic 20240328, version, vocabulary size, id of end-of-text (from version 2 on), 0...
//   then per token one byte, its length, and its bytes
//
// Version 1 has no end-of-text id; it is GPT-2's, 50256.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

class Tokenizer {
 public:
  // Throws RunError for anything but a whole, consistent file.
  explicit Tokenizer(const std::string& path);
  Tokenizer(Tokenizer&&) = default;
  Tokenizer(const Tokenizer&) = delete;  // the views below point into file_

  int32_t vocab_size() const { return static_cast<int32_t>(tokens_.size()); }
  int32_t eot() const { return eot_; }
  uint32_t crc() const { return crc_; }  // CRC-32 of the file, as shards state it
  const std::string& path() const { return path_; }

  // The bytes of a token; "" for an id outside the vocabulary (a model's padded rows have no text).
  std::string_view decode(int32_t id) const;
  // The longest token that fits, again and again. Exact for byte tokenizers. For GPT-2's it gives valid tokens that
  // spell the text, though not always those that its merges would give, which the file does not hold.
  // Throws UsageError naming --prompt where no token fits.
  std::vector<int32_t> encode(std::string_view text) const;
  // Throws RunError if shards that state this vocabulary size and CRC (each 0: not stated) were made with another one.
  // shards: whose they are, e.g. "--train-data".
  void require_made(int64_t vocab_size, uint32_t crc, const std::string& shards) const;

 private:
  std::string path_;
  std::vector<char> file_;
  std::vector<std::string_view> tokens_;                // (V) into file_
  std::unordered_map<std::string_view, int32_t> ids_;  // the lowest id, where two tokens have the same bytes
  size_t longest_ = 0;                                  // bytes
  int32_t eot_ = 0;
  uint32_t crc_ = 0;
};
