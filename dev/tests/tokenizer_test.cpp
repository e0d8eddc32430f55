// The tokenizer file: ids to bytes and back, and every defect of it told in one line.
#include "dataloader/tokenizer.h"

#include <gtest/gtest.h>

#include <random>

#include "dev/tests/temp_dir.h"
#include "runtime/crc32.h"
#include "runtime/error.h"

namespace {

std::string file_of(const std::vector<std::string>& tokens, uint32_t eot, uint32_t version = 2) {
  std::vector<uint32_t> header(256, 0);
  header[0] = 20240328, header[1] = version, header[2] = static_cast<uint32_t>(tokens.size()), header[3] = eot;
  std::string file = bytes_of(header);
  for (const std::string& token : tokens) file += static_cast<char>(token.size()) + token;
  return file;
}

std::vector<std::string> all_bytes() {
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; b++) tokens.push_back(std::string(1, static_cast<char>(b)));
  tokens.push_back("<|endoftext|>");
  return tokens;
}

std::string error_of(const TempDir& dir, const std::string& bytes) {
  const std::string path = dir.write("t.bin", bytes);
  const std::string message = message_of<RunError>([&] { Tokenizer t(path); });
  EXPECT_NE(message.find(path), std::string::npos) << message;
  return message;
}

void expect_part(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
}

}  // namespace

TEST(Tokenizer, BytesGoThereAndBack) {
  TempDir dir;
  const std::string file = file_of(all_bytes(), 256);
  const Tokenizer t(dir.write("tokenizer.bin", file));
  EXPECT_EQ(t.vocab_size(), 257);
  EXPECT_EQ(t.eot(), 256);
  EXPECT_EQ(t.crc(), crc32(file.data(), file.size()));
  std::string text;
  for (int k = 0; k < 512; k++) text += static_cast<char>(k * 7);
  const std::vector<int32_t> ids = t.encode(text);
  ASSERT_EQ(ids.size(), text.size());
  std::string back;
  for (size_t k = 0; k < ids.size(); k++) {
    EXPECT_EQ(ids[k], static_cast<unsigned char>(text[k]));
    back += t.decode(ids[k]);
  }
  EXPECT_EQ(back, text);
  EXPECT_EQ(t.encode("a<|endoftext|>b"), (std::vector<int32_t>{'a', 256, 'b'}));
  EXPECT_TRUE(t.encode("").empty());
  EXPECT_EQ(t.decode(-1), "");
  EXPECT_EQ(t.decode(257), "");
}

TEST(Tokenizer, TheLongestTokenIsTaken) {
  TempDir dir;
  const std::string longest(255, 'z');
  const Tokenizer t(dir.write("t.bin", file_of({"a", "ab", "abc", "c", " ", "c", longest}, 4)));
  EXPECT_EQ(t.encode("abcab c"), (std::vector<int32_t>{2, 1, 4, 3}));
  EXPECT_EQ(t.encode("a" + longest), (std::vector<int32_t>{0, 6}));
  EXPECT_EQ(t.decode(6), longest);
  const std::string message = message_of<UsageError>([&] { t.encode("abq"); });
  expect_part(message, "--prompt: byte 3, 0x71");
}

TEST(Tokenizer, Version1IsGpt2s) {
  TempDir dir;
  std::vector<std::string> tokens(50257, "x");
  EXPECT_EQ(Tokenizer(dir.write("t.bin", file_of(tokens, 0, 1))).eot(), 50256);
  tokens.resize(50256);
  expect_part(error_of(dir, file_of(tokens, 0, 1)), "50256 tokens and end-of-text 50256");
}

TEST(Tokenizer, MustFitTheShards) {
  TempDir dir;
  const Tokenizer t(dir.write("t.bin", file_of(all_bytes(), 256)));
  t.require_made(257, t.crc(), "--train-data");
  t.require_made(0, 0, "--train-data");
  expect_part(message_of<RunError>([&] { t.require_made(257, t.crc() ^ 1, "--train-data"); }), "--train-data: the");
  expect_part(message_of<RunError>([&] { t.require_made(50257, 0, "--train-data"); }), "50257");
}

TEST(Tokenizer, Defects) {
  TempDir dir;
  const std::string good = file_of({"a", "bc"}, 1);
  const auto with = [&](size_t word, uint32_t value) {
    std::string file = good;
    file.replace(4 * word, 4, bytes_of(std::vector<uint32_t>{value}));
    return file;
  };
  expect_part(error_of(dir, ""), "an empty file");
  expect_part(error_of(dir, "PK\x03\x04"), "first bytes 50 4b 03 04 \"PK..\"");
  expect_part(error_of(dir, with(0, 20240520)), "expected magic 20240328");
  expect_part(error_of(dir, good.substr(0, 500)), "cut short: 500 bytes");
  expect_part(error_of(dir, with(1, 3)), "version 3");
  expect_part(error_of(dir, with(2, 0)), "0 tokens");
  expect_part(error_of(dir, with(2, 0xffffffff)), "4294967295 tokens");
  expect_part(error_of(dir, with(2, 1 << 24)), "16777216 tokens, which makes");
  expect_part(error_of(dir, with(3, 2)), "end-of-text 2");
  expect_part(error_of(dir, good.substr(0, good.size() - 1)), "cut short: its 1028 bytes end within token 1 of 2");
  expect_part(error_of(dir, good + "d"), "too long: 1030 bytes, but its 2 tokens end at 1029");
  expect_part(error_of(dir, good.substr(0, 1024) + std::string("\0\2bc\1", 5)), "token 0 has no bytes");
  expect_part(error_of(dir, good.substr(0, 1024) + "\xff" + "abcd"), "cut short: its 1029 bytes end within token 0");
  expect_part(message_of<RunError>([&] { Tokenizer t(dir.path); }), "a folder");
  expect_part(message_of<RunError>([&] { Tokenizer t(dir / "none.bin"); }), "No such file");
}

TEST(Tokenizer, NoFileContentCrashesIt) {
  // Random damage to a good file: it loads or says why not. The sanitizer builds watch.
  TempDir dir;
  const std::string good = file_of(all_bytes(), 256);
  std::mt19937 random(7);
  for (int k = 0; k < 300; k++) {
    std::string file = good.substr(0, k % 3 ? good.size() : random() % good.size());
    for (int n = 0; n < 4 && !file.empty(); n++) {
      const size_t at = k % 2 ? random() % file.size() : random() % std::min<size_t>(16, file.size());
      file[at] = static_cast<char>(random());
    }
    try {
      const Tokenizer t(dir.write("t.bin", file));
      for (int32_t id = 0; id < t.vocab_size(); id++) EXPECT_FALSE(t.decode(id).empty());
    } catch (const RunError&) {
    }
  }
}
