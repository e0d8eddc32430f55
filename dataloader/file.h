// Opening and reading data files that a user names: whatever is there instead of the file, the answer is one line.
#pragma once
#include <cstdint>
#include <string>

// A regular file, open for reading. Throws RunError where it is missing, unreadable, a folder, a pipe or a device.
class File {
 public:
  // who: what the messages begin with, e.g. "--train-data: data/x/train_000.bin".
  File(const std::string& path, const std::string& who);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int fd() const { return fd_; }
  int64_t size() const { return size_; }  // bytes
  // Reads up to n bytes from the start and returns how many there were. Throws RunError on an I/O error.
  int64_t read(void* out, int64_t n, const std::string& who) const;

 private:
  int fd_ = -1;
  int64_t size_ = 0;
};

// A whole file, read-only, in memory as far as it is looked at.
class MappedFile {
 public:
  // Throws RunError as File does. who: what the messages begin with.
  MappedFile(const std::string& path, const std::string& who);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const char* data() const { return data_; }  // nullptr for an empty file
  int64_t size() const { return size_; }      // bytes

 private:
  const char* data_ = nullptr;
  int64_t size_ = 0;
};

// The first bytes of a file for a message: `first bytes 50 4b 03 04 "PK.."`, or `an empty file`.
std::string first_bytes(const void* data, int64_t n);

// A path or text as a message can carry it: control characters become '?', so that the message stays one line.
std::string printable(const std::string& text);
