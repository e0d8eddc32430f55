// Shards and their order: what is read is what was written, every sequence once an epoch, and every defect of a file
// ends in one line that names it.
#include "dataloader/dataset.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <set>

#include "dev/tests/temp_dir.h"
#include "runtime/crc32.h"
#include "runtime/error.h"

namespace {

std::string header(int32_t magic, int32_t version, int32_t tokens, int32_t vocab = 0, uint32_t crc = 0) {
  std::vector<int32_t> words(256, 0);
  words[0] = magic, words[1] = version, words[2] = tokens, words[3] = vocab, words[4] = static_cast<int32_t>(crc);
  return bytes_of(words);
}

// A whole shard, of 2 or 4 bytes a token.
std::string shard(const std::vector<int32_t>& ids, int width = 2, int32_t vocab = 0, uint32_t crc = 0) {
  const int32_t n = static_cast<int32_t>(ids.size());
  if (width == 4) return header(20240801, 7, n, vocab, crc) + bytes_of(ids);
  return header(20240520, 1, n, vocab, crc) + bytes_of(std::vector<uint16_t>(ids.begin(), ids.end()));
}

std::vector<int32_t> range(int32_t first, int32_t n) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

std::string open_error(const std::string& glob, int T = 4) {
  return message_of<RunError>([&] { Dataset(glob, T, "--train-data"); });
}

void expect_parts(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
  }
  EXPECT_EQ(message.rfind("--train-data: ", 0), 0u) << message;
}

// Memory of this process that maps files, KiB.
int64_t resident_file_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("RssFile:", 0) == 0) return std::stoll(line.substr(8));
  }
  return 0;
}

// The first token of each of the next n positions of the shuffled stream.
std::vector<int32_t> stream(Dataset& data, int T, uint64_t seed, int64_t first, int64_t n) {
  std::vector<int32_t> firsts, ids(static_cast<size_t>(T) + 1);
  for (int64_t i = first; i < first + n; i++) {
    data.read_shuffled(i, seed, ids.data());
    for (int t = 0; t <= T; t++) EXPECT_EQ(ids[static_cast<size_t>(t)], ids[0] + t);  // the tests' shards count up
    firsts.push_back(ids[0]);
  }
  return firsts;
}

}  // namespace

TEST(Crc32, KnownValues) {
  EXPECT_EQ(crc32("123456789", 9), 0xcbf43926u);  // the check value of the CRC catalogue
  EXPECT_EQ(crc32("", 0), 0u);
  EXPECT_EQ(crc32("56789", 5, crc32("1234", 4)), 0xcbf43926u);
}

TEST(Dataset, ReadsBothWidthsInFileOrder) {
  for (int width : {2, 4}) {
    TempDir dir;
    dir.write("a_1.bin", shard(range(100, 10), width));  // T = 4: 2 sequences, 1 token left
    dir.write("a_0.bin", shard(range(200, 5), width));   // exactly T + 1: 1 sequence
    dir.write("a_2.bin", shard(range(300, 4), width));   // too short: none
    dir.write("a_3.bin", shard(range(400, 13), width));  // 3 sequences, nothing left
    dir.write("b.bin", "not of this data set");
    Dataset data(dir / "a_*.bin", 4, "--train-data");
    EXPECT_EQ(data.shards(), 4);
    EXPECT_EQ(data.path(0), dir / "a_0.bin");
    EXPECT_EQ(data.tokens(), 10 + 5 + 4 + 13);
    EXPECT_EQ(data.sequences(), 2 + 1 + 0 + 3);
    EXPECT_EQ(data.dropped_tokens(), 1 + 0 + 4 + 0);
    data.set_vocab_size(1000);
    std::vector<int32_t> firsts;
    for (int64_t i = 0; i < data.sequences(); i++) {
      int32_t ids[6] = {0, 0, 0, 0, 0, -7};
      data.read(i, ids);
      for (int t = 0; t < 5; t++) EXPECT_EQ(ids[t], ids[0] + t);
      EXPECT_EQ(ids[5], -7) << "written past T + 1";
      firsts.push_back(ids[0]);
    }
    EXPECT_EQ(firsts, (std::vector<int32_t>{200, 100, 104, 400, 404, 408}));
  }
}

TEST(Dataset, WideIdsAreNotCutTo16Bits) {
  TempDir dir;
  const std::string path = dir.write("s.bin", shard({70000, 128255, 1, 65536, 0}, 4));
  Dataset data(path, 4, "--train-data");
  data.set_vocab_size(128256);
  std::vector<int32_t> ids(5);
  data.read(0, ids.data());
  EXPECT_EQ(ids, (std::vector<int32_t>{70000, 128255, 1, 65536, 0}));
}

TEST(Dataset, AnEpochIsEverySequenceOnceAndEachInAnotherOrder) {
  TempDir dir;
  const int T = 3;
  std::set<int32_t> all;
  for (int k = 0; k < 7; k++) {
    const int32_t n = 1 + T * (5 * k + (k == 3 ? 0 : 4));  // unequal: 4, 9, 14, 15, 24, ... sequences
    dir.write("s" + std::to_string(k) + ".bin", shard(range(1000 * (k + 1), n)));
    for (int32_t i = 0; i + T < n; i += T) all.insert(1000 * (k + 1) + i);
  }
  Dataset data(dir / "s?.bin", T, "--train-data");
  data.set_vocab_size(10000);
  const int64_t n = data.sequences();
  ASSERT_EQ(n, static_cast<int64_t>(all.size()));
  std::set<std::vector<int32_t>> orders, shard_orders, orders_within;
  for (int64_t epoch = 0; epoch < 6; epoch++) {
    const std::vector<int32_t> firsts = stream(data, T, 1337, epoch * n, n);
    EXPECT_EQ(std::set<int32_t>(firsts.begin(), firsts.end()), all) << "epoch " << epoch;
    orders.insert(firsts);
    // One shard after the other, in an order that differs from epoch to epoch.
    std::vector<int32_t> visited;
    for (int32_t first : firsts) visited.push_back(first / 1000);
    visited.erase(std::unique(visited.begin(), visited.end()), visited.end());
    EXPECT_EQ(visited.size(), 7u) << "a shard was left and taken up again";
    shard_orders.insert(visited);
    // Within a shard the order is a shuffled one too.
    std::vector<int32_t> largest;
    std::copy_if(firsts.begin(), firsts.end(), std::back_inserter(largest), [](int32_t f) { return f / 1000 == 7; });
    EXPECT_FALSE(std::is_sorted(largest.begin(), largest.end()));
    orders_within.insert(largest);
  }
  EXPECT_EQ(orders.size(), 6u);
  EXPECT_EQ(orders_within.size(), 6u);
  EXPECT_GE(shard_orders.size(), 5u);  // of 5040: two equal ones among 6 have a chance of 0.3 %
  EXPECT_NE(stream(data, T, 1338, 0, n), stream(data, T, 1337, 0, n));
}

TEST(Dataset, ShuffledReadsDependOnSeedAndPositionOnly) {
  TempDir dir;
  const int T = 2;
  for (int k = 0; k < 3; k++) dir.write("s" + std::to_string(k), shard(range(1000 * k, 20 + 7 * k)));
  Dataset data(dir / "s*", T, "--train-data");
  data.set_vocab_size(5000);
  const int64_t n = 4 * data.sequences();
  const std::vector<int32_t> forward = stream(data, T, 9, 0, n);
  Dataset other(dir / "s*", T, "--val-data");
  other.set_vocab_size(5000);
  for (int64_t k = 0; k < n; k++) {  // another object, backwards, with reads of other seeds and places between
    const int64_t i = n - 1 - k;
    stream(other, T, 10, (i * 7919) % n, 1);
    EXPECT_EQ(stream(other, T, 9, i, 1)[0], forward[static_cast<size_t>(i)]) << i;
  }
  EXPECT_EQ(stream(other, T, 9, int64_t{1} << 40, 3).size(), 3u);  // far away: no memory, no time
}

TEST(Dataset, StatesVocabularyAndTokenizer) {
  TempDir dir;
  dir.write("a.bin", shard(range(0, 9), 2, 0, 0));
  dir.write("b.bin", shard(range(0, 9), 2, 257, 0xdeadbeef));
  EXPECT_EQ(Dataset(dir / "a.bin", 4, "-").vocab_size(), 0);
  Dataset data(dir / "{a,b}.bin", 4, "--train-data");
  EXPECT_EQ(data.vocab_size(), 257);
  EXPECT_EQ(data.tokenizer_crc(), 0xdeadbeefu);
  EXPECT_EQ(data.tokenizer_path(), "");
  dir.write("tokenizer.bin", "");
  EXPECT_EQ(data.tokenizer_path(), dir / "tokenizer.bin");
  expect_parts(message_of<RunError>([&] { data.set_vocab_size(256); }), {"257", "256", "--vocab-size=257"});
  data.set_vocab_size(50257);

  dir.write("c.bin", shard(range(0, 9), 2, 50257, 0));
  dir.write("d.bin", shard(range(0, 9), 2, 257, 0xdeadbee0));
  expect_parts(open_error(dir / "{b,c}.bin"), {"b.bin", "257", "c.bin", "50257", "disagree"});
  expect_parts(open_error(dir / "{b,d}.bin"), {"b.bin", "deadbeef", "d.bin", "deadbee0", "disagree"});
  const Dataset c(dir / "c.bin", 4, "--val-data"), d(dir / "d.bin", 4, "--val-data"), a(dir / "a.bin", 4, "--val-data");
  EXPECT_NE(message_of<RunError>([&] { data.require_same_tokens(c); }).find("--val-data"), std::string::npos);
  EXPECT_NE(message_of<RunError>([&] { data.require_same_tokens(d); }).find("--val-data"), std::string::npos);
  data.require_same_tokens(a);
}

TEST(Dataset, TokensOutsideTheVocabularyAreNamed) {
  for (int width : {2, 4}) {
    TempDir dir;
    // Far enough in that the check has gone through more than one of its pieces (32 MiB).
    std::vector<int32_t> ids(20'000'000, 96);
    const size_t bad = width == 2 ? 17'000'000 : 9'000'000;
    ids[bad] = 97;
    ids[bad + 5] = 98;
    const std::string path = dir.write("bad.bin", shard(ids, width));
    Dataset data(path, 4, "--train-data");
    int32_t out[5];
    data.set_vocab_size(97);
    const std::string message = message_of<RunError>([&] { data.read(0, out); });
    expect_parts(message, {path, "token " + std::to_string(bad) + " ", "is 97", "97 (--vocab-size)",
                           "byte " + std::to_string(1024 + bad * static_cast<size_t>(width))});
    EXPECT_FALSE(message_of<RunError>([&] { data.read_shuffled(0, 1, out); }).empty()) << "only told once";
    data.set_vocab_size(99);
    data.read(0, out);
    // The pages that the check touched are given back: not the whole shard (4-byte ids: 78 MiB), one piece at most.
    EXPECT_LT(resident_file_kib(), 65536);
    data.set_vocab_size(98);  // a smaller one is checked again
    expect_parts(message_of<RunError>([&] { data.read(0, out); }), {"token " + std::to_string(bad + 5) + " ", "is 98"});
  }
}

TEST(Dataset, FirstAndLastTokenAreChecked) {
  for (int width : {2, 4}) {
    for (size_t bad : {size_t{0}, size_t{6}}) {
      TempDir dir;
      std::vector<int32_t> ids(7, 1);
      ids[bad] = width == 2 ? 65535 : -1;  // -1: 4294967295, which must not become a negative index
      Dataset data(dir.write("s.bin", shard(ids, width)), 6, "--train-data");
      data.set_vocab_size(width == 2 ? 65535 : INT32_MAX);
      int32_t out[7];
      expect_parts(message_of<RunError>([&] { data.read(0, out); }),
                   {"token " + std::to_string(bad) + " ", width == 2 ? "is 65535" : "is 4294967295"});
    }
  }
}

TEST(Dataset, HeaderDefects) {
  TempDir dir;
  const std::string two(20, '\0');  // 10 tokens
  const auto error = [&](const std::string& bytes) {
    const std::string path = dir.write("x.bin", bytes), message = open_error(path);
    expect_parts(message, {path});
    return message;
  };
  expect_parts(error(""), {"0 bytes", "an empty file", "prepare_data.py"});
  expect_parts(error("ab"), {"2 bytes", "first bytes 61 62 \"ab\"", "20240520"});
  expect_parts(error("version https://git-lfs"),
               {"23 bytes", "76 65 72 73 69 6f 6e 20 \"version \"", "20240520 (88 d8 34 01)"});
  expect_parts(error(header(20240521, 1, 10) + two), {"not a token shard", "1044 bytes", "89 d8 34 01 01 00 00 00"});
  expect_parts(error(header(20240520, 1, 10).substr(0, 1000)), {"cut short", "1000 bytes", "1024"});
  expect_parts(error(header(20240520, 2, 10) + two), {"version 2", "expected 1"});
  expect_parts(error(header(20240801, 1, 5) + two), {"version 1", "expected 7"});
  // The count one too large, one too small, zero, negative; and counts whose size overflows 32 bits.
  expect_parts(error(header(20240520, 1, 11) + two), {"cut short", "1044 bytes", "11 tokens of 2 bytes", "1046"});
  expect_parts(error(header(20240520, 1, 9) + two), {"too long", "1044 bytes", "9 tokens of 2 bytes", "1042"});
  expect_parts(error(header(20240520, 1, 10) + two + "x"), {"too long", "1045 bytes"});
  expect_parts(error(header(20240520, 1, 0) + two), {"states 0 tokens", "hold 10"});
  expect_parts(error(header(20240520, 1, 0)), {"states 0 tokens", "hold 0"});
  expect_parts(error(header(20240520, 1, -1) + two), {"states -1 tokens"});
  expect_parts(error(header(20240520, 1, INT32_MIN) + two), {"states -2147483648 tokens"});
  expect_parts(error(header(20240801, 7, 1 << 30)), {"cut short", "1073741824 tokens", "4294968320"});
  expect_parts(error(header(20240801, 7, INT32_MAX) + two), {"cut short", "8589935612"});
  expect_parts(error(header(20240520, 1, 10, -257) + two), {"vocabulary of -257"});
}

TEST(Dataset, TooShortForOneSequence) {
  TempDir dir;
  dir.write("a.bin", shard(range(0, 5)));
  EXPECT_EQ(Dataset(dir / "a.bin", 4, "-").sequences(), 1);
  expect_parts(open_error(dir / "a.bin", 5), {"a.bin holds 5 tokens", "--seq-len=5 needs 6", "--seq-len=4 would fit"});
  dir.write("b.bin", shard(range(0, 1)));
  expect_parts(open_error(dir / "b.bin", 1), {"b.bin holds 1 token,", "--seq-len=1 needs 2", "more text"});
  expect_parts(open_error(dir / "*.bin", 1024),
               {"longest of the 2 shards", "holds 5 tokens", "1025", "--seq-len=4 would fit"});
}

TEST(Dataset, NotAFile) {
  TempDir dir;
  expect_parts(open_error(dir / "*.bin"), {"no file matches '" + dir.path + "/*.bin'", "prepare_data.py kjv"});
  expect_parts(open_error("/nonexistent/x.bin"), {"no file matches '/nonexistent/x.bin'"});
  expect_parts(open_error(""), {"empty"});
  expect_parts(open_error(dir.path), {"'" + dir.path + "' is a folder", "/*.bin'"});
  expect_parts(open_error("/dev/null"), {"/dev/null: a device"});
  ASSERT_EQ(mkfifo((dir / "pipe.bin").c_str(), 0600), 0);
  expect_parts(open_error(dir / "pipe.bin"), {"pipe.bin: a pipe"});  // and does not wait for a writer
  std::filesystem::create_directory(dir / "folder.bin");
  expect_parts(open_error(dir / "{pipe,folder}.bin"), {"folder.bin: a folder"});
  std::filesystem::create_symlink("nowhere", dir / "link.bin");
  expect_parts(open_error(dir / "link.bi?"), {"link.bin: cannot be opened: No such file"});
  dir.write("two\nlines", "x");
  expect_parts(open_error(dir / "two*"), {"two?lines"});
  dir.write("closed.bin", shard(range(0, 9)));
  ASSERT_EQ(chmod((dir / "closed.bin").c_str(), 0), 0);
  if (geteuid() != 0) expect_parts(open_error(dir / "closed.bin"), {"closed.bin: cannot be opened: Permission"});
}

TEST(Dataset, APathWithGlobCharactersIsTakenAsItIs) {
  TempDir dir;
  const std::string path = dir.write("a[1].bin", shard(range(0, 9)));
  EXPECT_EQ(Dataset(path, 4, "-").path(0), path);
}

TEST(Dataset, SparseShardOf3GiBIsReadAtItsEnd) {
  TempDir dir;
  const int32_t n = 1'610'612'736;  // 3 GiB of uint16: byte offsets over 2^31
  const std::string path = dir.write("sparse.bin", header(20240520, 1, n, 257));
  ASSERT_EQ(truncate(path.c_str(), 1024 + int64_t{2} * n), 0);
  const int T = 1024;
  const uint16_t mark[2] = {250, 251};
  const int64_t last = (int64_t{n} - 1) / T - 1;  // n = 0 mod T, so that T - 1 ids after this sequence are dropped
  const int fd = open(path.c_str(), O_WRONLY);
  ASSERT_EQ(pwrite(fd, mark, 4, 1024 + 2 * (last * T + T - 1)), 4);
  close(fd);
  Dataset data(path, T, "--train-data");
  EXPECT_EQ(data.sequences(), last + 1);
  EXPECT_EQ(data.dropped_tokens(), T - 1);
  data.set_vocab_size(257);
  std::vector<int32_t> ids(T + 1);
  const auto start = std::chrono::steady_clock::now();
  data.read(last, ids.data());
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  printf("3 GiB checked in %.2f s\n", seconds);
  EXPECT_EQ(ids[T - 2], 0);
  EXPECT_EQ(ids[T - 1], 250);
  EXPECT_EQ(ids[T], 251);
}

// In a process of its own, for it ends.
TEST(DatasetDeathTest, AShardThatIsCutShortWhileItIsReadIsOneLine) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  TempDir dir;
  const std::string path = dir.write("a.bin", shard(range(0, 9999)));
  const auto read = [&] {
    Dataset data(path, 4, "--train-data");
    data.set_vocab_size(10000);
    if (truncate(path.c_str(), 0)) abort();
    std::vector<int32_t> ids(5);
    data.read(2000, ids.data());
  };
  EXPECT_EXIT(read(), testing::ExitedWithCode(1), "^train_gpt: error: a file was cut short while it was read");
}
