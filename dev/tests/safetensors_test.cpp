// The safetensors reader: good files as they are, every defect in one line. And the headers that are written.
#include "runtime/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "dev/tests/temp_dir.h"
#include "runtime/error.h"

namespace {

std::string file_of(const std::string& header, const std::string& data = "") {
  return bytes_of(std::vector<uint64_t>{header.size()}) + header + data;
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

// Of a file of one tensor "a" with this entry and 8 bytes of data.
std::string one(const std::string& text) { return file_of(R"({"a":)" + text + "}", "12345678"); }

std::string error_of(const TempDir& dir, const std::string& bytes) {
  const std::string path = dir.write("x.safetensors", bytes);
  const std::string message = message_of<RunError>([&] { Safetensors s(path, "--model: x"); });
  EXPECT_TRUE(message.starts_with("--model: x: ")) << message;
  return message;
}

void expect_part(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
}

}  // namespace

TEST(Safetensors, WhatIsWrittenIsRead) {
  TempDir dir;
  for (const bool pt : {false, true}) {
    std::vector<TensorInfo> tensors = {{"z.weight", "F32", {2, 3}, 0, 0},
                                       {"scalar", "I64", {}, 0, 0},
                                       {"none", "BF16", {0, 7}, 0, 0},
                                       {"a \"quoted\"\n", "I8", {5}, 0, 0}};
    std::string data;
    for (int i = 0; i < 37; i++) data += static_cast<char>('a' + i);
    const std::string header = safetensors_header(tensors, pt);
    EXPECT_EQ(header.size() % 64, 0u);
    EXPECT_EQ(header.find("__metadata__") != std::string::npos, pt);
    const Safetensors s(dir.write("x.safetensors", header + data), "x");
    EXPECT_EQ(s.who(), "x");
    EXPECT_EQ(s.bytes(), static_cast<int64_t>(header.size()) + 37);
    ASSERT_EQ(s.tensors().size(), 4u);
    for (size_t i = 0; i < 4; i++) {
      const TensorInfo& t = s.tensors()[i];
      EXPECT_EQ(t.name, tensors[i].name);
      EXPECT_EQ(t.dtype, tensors[i].dtype);
      EXPECT_EQ(t.shape, tensors[i].shape);
      EXPECT_EQ(t.elements(), tensors[i].elements());
      EXPECT_EQ(
          std::string(s.data(t), static_cast<size_t>(t.end - t.begin)),
          data.substr(static_cast<size_t>(tensors[i].begin), static_cast<size_t>(tensors[i].end - tensors[i].begin)));
      EXPECT_EQ(s.find(t.name), &t);
    }
    EXPECT_EQ(s.find("z"), nullptr);
    EXPECT_EQ(s.find("__metadata__"), nullptr);
  }
}

TEST(Safetensors, TensorsComeInTheOrderOfTheirData) {
  TempDir dir;
  const std::string header = R"({"b":)" + entry("U8", "[3]", "[5,8]") + R"(,"a":)" + entry("U8", "[5]", "[0,5]") +
                             R"(,"__metadata__":{"x":"y"}}  )";
  const Safetensors s(dir.write("x", file_of(header, "01234567")), "x");
  ASSERT_EQ(s.tensors().size(), 2u);
  EXPECT_EQ(s.tensors()[0].name, "a");
  EXPECT_EQ(*s.data(*s.find("b")), '5');
}

TEST(Safetensors, AnEmptyOneIsGood) {
  TempDir dir;
  EXPECT_TRUE(Safetensors(dir.write("x", file_of("{}")), "x").tensors().empty());
  std::vector<TensorInfo> none;
  EXPECT_TRUE(Safetensors(dir.write("x", safetensors_header(none, true)), "x").tensors().empty());
}

TEST(Safetensors, NotSuchAFile) {
  TempDir dir;
  expect_part(error_of(dir, ""), "not a safetensors file: 0 bytes, an empty file");
  expect_part(error_of(dir, std::string(8, '\1')), "not a safetensors file: 8 bytes");
  expect_part(error_of(dir, "version https://git-lfs"), "first bytes 76 65 72 73 69 6f 6e 20 \"version \"");
  expect_part(error_of(dir, "PK\3\4 something {"), "not a safetensors file");
  expect_part(error_of(dir, file_of("[1]")), "not a safetensors file");
  const auto length = [](uint64_t n) { return bytes_of(std::vector<uint64_t>{n}) + "{}"; };
  expect_part(error_of(dir, length(3)), "cut short: its 10 bytes end within the header of 3");
  expect_part(error_of(dir, length(100'000'000)), "cut short");
  for (const uint64_t n : {uint64_t{100'000'001}, uint64_t{1} << 63, ~uint64_t{0}, ~uint64_t{7}})
    expect_part(error_of(dir, length(n)), "expected at most 100000000");
  expect_part(error_of(dir, length(1)), "not JSON from byte");
  expect_part(error_of(dir, length(0)), "not JSON from byte");
  expect_part(message_of<RunError>([&] { Safetensors s(dir.path, "x"); }), "x: a folder");
  expect_part(message_of<RunError>([&] { Safetensors s(dir / "none", "x"); }), "x: cannot be opened: No such file");
}

TEST(Safetensors, HeadersThatAreNoJson) {
  TempDir dir;
  for (const std::string text :
       {"{", "{\"", "{\"a", "{\"a\"", "{\"a\":", "{]", "{} {}", "{},", "{\"a\":{\"dtype\":\"F3", "{\"a\":nul",
        "{\"\xff\":{}}", "{\"\n\":{}}", "{\"a\\u12\":{}}", "{1:{}}", "{//\n}"})
    expect_part(error_of(dir, file_of(text)), "not JSON from byte");
}

TEST(Safetensors, HeadersOfAnotherForm) {
  TempDir dir;
  for (const std::string value : {"null", "true", "1", "-1", "1.5", "\"x\"", "[]"})
    expect_part(error_of(dir, one(value)), "tensor 'a': found " + (value == "[]"      ? "["
                                                                   : value == "\"x\"" ? "'x'"
                                                                                      : value));
  expect_part(error_of(dir, one("{}")), "found no dtype");
  expect_part(error_of(dir, one(R"({"dtype":"U8","data_offsets":[0,8]})")), "found no shape");
  expect_part(error_of(dir, one(R"({"dtype":"U8","shape":[8]})")), "found no such data_offsets");
  expect_part(error_of(dir, one(entry("U8", "[8]", "[]"))), "found no such data_offsets");
  expect_part(error_of(dir, one(entry("U8", "[8]", "[0]"))), "found no such data_offsets");
  expect_part(error_of(dir, one(entry("U8", "[8]", "[0,8,8]"))), "found a third number");
  expect_part(error_of(dir, one(R"({"dtype":8,"shape":[8],"data_offsets":[0,8]})")), "expected a dtype in quotes");
  expect_part(error_of(dir, one(R"({"dtype":"U8","dtype":"U8"})")), "the field 'dtype' twice");
  expect_part(error_of(dir, one(R"({"dtype":"U8","stride":[8]})")), "the field 'stride'");
  for (const std::string bad : {"8", "{}", "null", "\"8\""})
    expect_part(error_of(dir, one(entry("U8", bad, "[0,8]"))), "expected a list of numbers");
  for (const std::string bad : {"[8.0]", "[8e0]", "[-8]", "[null]", "[\"8\"]", "[true]", "[{}]",
                                "[9223372036854775808]", "[18446744073709551624]"})
    expect_part(error_of(dir, one(entry("U8", bad, "[0,8]"))), "expected a size");
  expect_part(error_of(dir, one(entry("U8", "[[8]]", "[0,8]"))), "found [");
  expect_part(error_of(dir, one(entry("U8", "[1e999]", "[0,8]"))), "not JSON");
  for (const std::string bad : {"[0,8.0]", "[-1,8]", "[0,\"8\"]", "[0,9223372036854775808]"})
    expect_part(error_of(dir, one(entry("U8", "[8]", bad))), "expected two offsets");
  for (const std::string bad :
       {"1", "null", "[]", "\"x\"", R"({"a":1})", R"({"a":null})", R"({"a":{}})", R"({"a":[]})"})
    expect_part(error_of(dir, file_of(R"({"__metadata__":)" + bad + "}")), "metadata: found");
  expect_part(error_of(dir, file_of(R"({"__metadata__":{},"__metadata__":{}})")), "__metadata__ twice");
}

TEST(Safetensors, NestingIsNotFollowed) {
  TempDir dir;
  const size_t n = 5'000'000;
  for (const std::string open : {"[", "{\"a\":"}) {
    std::string deep;
    while (deep.size() < n) deep += open;
    for (const std::string before : {"{\"a\":", "{\"__metadata__\":", "{\"a\":{\"shape\":"})
      expect_part(error_of(dir, file_of(before + deep)), "found ");
  }
}

TEST(Safetensors, TensorsThatCannotBe) {
  TempDir dir;
  expect_part(error_of(dir, one(entry("F31", "[2]", "[0,8]"))), "unknown dtype 'F31'");
  expect_part(error_of(dir, one(entry("", "[2]", "[0,8]"))), "unknown dtype ''");
  expect_part(error_of(dir, one(entry("f32", "[2]", "[0,8]"))), "unknown dtype 'f32'");
  expect_part(error_of(dir, one(entry("F32", "[3]", "[0,8]"))), "F32 of shape [3] does not make its 8 bytes");
  expect_part(error_of(dir, one(entry("F32", "[2]", "[8,0]"))), "data_offsets 8 to 0");
  expect_part(error_of(dir, one(entry("F32", "[3]", "[0,12]"))),
              "data_offsets 0 to 12, expected a part of the file's 8");
  expect_part(error_of(dir, one(entry("F32", "[1]", "[4,8]"))), "begins at byte 4 of the data, expected 0");
  expect_part(error_of(dir, one(entry("F32", "[1]", "[0,4]"))), "too long: 8 bytes of data, but its tensors end at 4");
  expect_part(error_of(dir, file_of("{}", "1")), "too long: 1 bytes of data");
  // Products that overflow to just the right number.
  expect_part(error_of(dir, one(entry("U8", "[4294967296,4294967296,8]", "[0,8]"))), "does not make its 8 bytes");
  expect_part(error_of(dir, one(entry("F64", "[2305843009213693953]", "[0,8]"))), "does not make its 8 bytes");
  expect_part(error_of(dir, one(entry("U8", "[9223372036854775807,9223372036854775807]", "[0,1]"))), "does not make");
  const auto two = [&](const std::string& a, const std::string& b, const std::string& name = "b") {
    return error_of(dir, file_of(R"({"a":)" + a + ",\"" + name + "\":" + b + "}", "12345678"));
  };
  expect_part(two(entry("U8", "[5]", "[0,5]"), entry("U8", "[4]", "[4,8]")), "tensor 'b' begins at byte 4");
  expect_part(two(entry("U8", "[3]", "[0,3]"), entry("U8", "[4]", "[4,8]")), "tensor 'b' begins at byte 4");
  expect_part(two(entry("U8", "[8]", "[0,8]"), entry("U8", "[8]", "[0,8]")), "tensor 'b' begins at byte 0");
  expect_part(two(entry("U8", "[4]", "[0,4]"), entry("U8", "[4]", "[4,8]"), "a"), "tensor 'a' is there twice");
  expect_part(two(entry("U8", "[4]", "[0,4]"), entry("U8", "[4]", "[4,8]"), "\\u0061"), "tensor 'a' is there twice");
  expect_part(two(entry("U8", "[4]", "[0,4]"), entry("U8", "[5]", "[4,8]"), "\\n\\u001b[31m"), "tensor '??[31m'");
}

TEST(Safetensors, EveryShorterFileIsRefused) {
  TempDir dir;
  std::vector<TensorInfo> tensors = {{"a", "F32", {3}, 0, 0}, {"b", "U8", {5}, 0, 0}};
  const std::string good = safetensors_header(tensors, true) + std::string(17, 'x');
  for (size_t n = 0; n < good.size(); n++) error_of(dir, good.substr(0, n));
  error_of(dir, good + "x");
}

TEST(Safetensors, NoFileContentCrashesIt) {
  // Random damage to a good file: it loads or says why not. The sanitizer builds watch.
  TempDir dir;
  std::vector<TensorInfo> tensors = {{"a", "F32", {2, 2}, 0, 0}, {"b", "U8", {5}, 0, 0}, {"c", "I16", {}, 0, 0}};
  const std::string good = safetensors_header(tensors, true) + std::string(23, 'x');
  const std::string structure = "{}[]\",:0123456789-.e\\";
  std::mt19937 random(7);
  for (int k = 0; k < 1000; k++) {
    std::string file = good;
    for (int n = 0; n < 1 + k % 3; n++)
      file[random() % file.size()] = k % 2 ? structure[random() % structure.size()] : static_cast<char>(random());
    try {
      const Safetensors s(dir.write("x", file), "x");
      for (const TensorInfo& t : s.tensors()) EXPECT_LE(s.data(t) - s.data(s.tensors()[0]) + t.end - t.begin, 23);
    } catch (const RunError&) {
    }
  }
}
