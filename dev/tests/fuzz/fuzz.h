// For the fuzz targets: an input as a file, since the readers take paths.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "runtime/error.h"

// A file in memory that has a path. What it was given last is all that it holds.
class InputFile {
 public:
  InputFile() : fd_(memfd_create("input", MFD_CLOEXEC)) { CHECK(fd_ >= 0, "no memfd"); }
  void set(std::string_view bytes) {
    CHECK(ftruncate(fd_, 0) == 0 && pwrite(fd_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()),
          "%zu bytes could not be written", bytes.size());
  }
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  int fd_;
};

// A folder for links to such files, which is gone in the end.
class InputFolder {
 public:
  InputFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "train_gpt_fuzz_XXXXXX").string();
    CHECK(mkdtemp(name.data()), "no folder");
    path_ = name;
  }
  ~InputFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  InputFolder(const InputFolder&) = delete;
  void link(const InputFile& file, const std::string& name) {
    const std::filesystem::path place = std::filesystem::path(path_) / name;
    std::filesystem::create_directories(place.parent_path());
    std::filesystem::create_symlink(file.path(), place);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Runs a reader. An input may be refused, in one line; anything else that goes wrong is a finding.
template <class Read>
int fuzz(Read&& read) {
  std::string message;
  try {
    read();
  } catch (const RunError& error) {
    message = error.what();
  } catch (const UsageError& error) {
    message = error.what();
  }
  for (const char c : message)
    CHECK(static_cast<unsigned char>(c) >= ' ' && c != 127, "a control character in: %s", message.c_str());
  return 0;
}
