// For tests: a folder that is gone at the end of the test, and files to put into it.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

struct TempDir {
  std::string path;
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "train_gpt_test_XXXXXX").string();
    if (!mkdtemp(name.data())) abort();
    path = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  TempDir(const TempDir&) = delete;
  std::string operator/(const std::string& name) const { return path + "/" + name; }
  // Writes a file and returns its path.
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path + "/" + name, std::ios::binary) << bytes;
    return path + "/" + name;
  }
};

// The bytes of a vector of numbers.
template <typename Number>
std::string bytes_of(const std::vector<Number>& numbers) {
  return std::string(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(Number));
}

// The message of the exception of type Error that f throws; "" if it throws none. It must be one line.
template <typename Error, typename Function>
std::string message_of(Function f) {
  try {
    f();
  } catch (const Error& e) {
    const std::string message = e.what();
    return message.find('\n') == std::string::npos ? message : "more than one line: " + message;
  }
  return "";
}
