#include "dataloader/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "runtime/error.h"

#if __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, bytes) ((void)(begin), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(begin, bytes) ((void)(begin), (void)(bytes))
#endif

// What the last page of a mapped file holds beyond its end. It reads as zeros, which would hide a reader that goes on
// too far: AddressSanitizer is told that it is not there.
static size_t rest_of_page(int64_t size) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (page - static_cast<size_t>(size) % page) % page;
}

File::File(const std::string& path, const std::string& who) {
  // O_NONBLOCK: opening a pipe must not wait for a writer. It means nothing for regular files.
  fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) {
    const int error = errno;
    struct stat st;
    if (error == ENXIO && stat(path.c_str(), &st) == 0) RUN_ERROR("%s: a socket, expected a file", who.c_str());
    RUN_ERROR("%s: cannot be opened: %s", who.c_str(), strerror(error));
  }
  struct stat st;
  const char* kind = nullptr;
  if (fstat(fd_, &st) != 0) kind = "something that cannot be examined";
  else if (S_ISDIR(st.st_mode)) kind = "a folder";
  else if (S_ISFIFO(st.st_mode)) kind = "a pipe";
  else if (!S_ISREG(st.st_mode)) kind = "a device";
  if (kind) {
    close(fd_);
    RUN_ERROR("%s: %s, expected a file", who.c_str(), kind);
  }
  size_ = st.st_size;
}

File::~File() { close(fd_); }

int64_t File::read(void* out, int64_t n, const std::string& who) const {
  int64_t done = 0;
  while (done < n) {
    const ssize_t got = pread(fd_, static_cast<char*>(out) + done, static_cast<size_t>(n - done), done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) RUN_ERROR("%s: cannot be read: %s", who.c_str(), strerror(errno));
    if (got == 0) break;
    done += got;
  }
  return done;
}

// What reads a mapped file gets no error where the file is shorter by now or its disk fails, but this signal.
static void on_bus_error(int) {
  constexpr char line[] = "train_gpt: error: a file was cut short while it was read, or its disk failed\n";
  [[maybe_unused]] const ssize_t n = write(STDERR_FILENO, line, sizeof line - 1);
  _exit(1);
}

MappedFile::MappedFile(const std::string& path, const std::string& who) {
  std::signal(SIGBUS, on_bus_error);
  const File file(path, who);
  size_ = file.size();
  if (size_ == 0) return;
  void* map = mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_SHARED, file.fd(), 0);
  if (map == MAP_FAILED) RUN_ERROR("%s: cannot be mapped: %s", who.c_str(), strerror(errno));
  data_ = static_cast<const char*>(map);
  ASAN_POISON_MEMORY_REGION(data_ + size_, rest_of_page(size_));
}

MappedFile::~MappedFile() {
  if (!data_) return;
  ASAN_UNPOISON_MEMORY_REGION(data_ + size_, rest_of_page(size_));
  munmap(const_cast<char*>(data_), static_cast<size_t>(size_));
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

std::string first_bytes(const void* data, int64_t n) {
  if (n == 0) return "an empty file";
  const auto* p = static_cast<const unsigned char*>(data);
  std::string hex, text;
  for (int64_t i = 0; i < std::min<int64_t>(n, 8); i++) {
    hex += strf(" %02x", p[i]);
    text += p[i] >= 0x20 && p[i] < 0x7f ? static_cast<char>(p[i]) : '.';
  }
  return "first bytes" + hex + " \"" + text + "\"";
}

std::string printable(const std::string& text) {
  std::string s = text;
  for (char& c : s) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return s;
}
