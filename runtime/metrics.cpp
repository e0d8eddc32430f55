// Lines go out by write(2), with no buffer of ours, so that a line is in the file before the next step begins, and a
// failed write can be taken back.
#include "runtime/metrics.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "runtime/error.h"
#include "runtime/options.h"

namespace fs = std::filesystem;

namespace {

nlohmann::ordered_json json_of(const Record& record) {
  nlohmann::ordered_json object = nlohmann::ordered_json::object();
  for (const auto& [key, value] : record.fields) {
    std::visit(
        [&](const auto& v) {
          if constexpr (std::is_same_v<std::decay_t<decltype(v)>, Record>)
            object[key] = json_of(v);
          else
            object[key] = v;
        },
        value);
  }
  return object;
}

void make_folder(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (fs::is_directory(folder)) return;
  if (error == std::errc::not_a_directory || fs::exists(fs::status(folder, error))) {
    RUN_ERROR("--out: found a file in the way of %s, expected a folder or nothing; choose another name",
              in_quotes(folder).c_str());
  }
  RUN_ERROR("--out: cannot create the folder %s: %s; choose a place where you may write", in_quotes(folder).c_str(),
            error.message().c_str());
}

// Renames an earlier run's file to the first free name, and returns that name; "" if there was no file.
std::string move_aside(const fs::path& file) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(file, error);
  if (!fs::exists(status)) return "";
  if (fs::is_directory(status)) {
    RUN_ERROR("--out: found the folder %s, expected a file or nothing; choose another name",
              in_quotes(file.string()).c_str());
  }
  for (int n = 1;; n++) {
    const fs::path free = file.parent_path() / strf("metrics.%d.jsonl", n);
    if (fs::exists(fs::symlink_status(free, error))) continue;
    fs::rename(file, free, error);
    if (error) {
      RUN_ERROR("--out: cannot rename the earlier %s: %s; choose another --out", in_quotes(file.string()).c_str(),
                error.message().c_str());
    }
    return free.string();
  }
}

// Bytes of the lines up to that of a step: the run's, then one a step in their order. Half a line is none.
int64_t size_up_to(const fs::path& file, int64_t last_step) {
  std::ifstream lines(file, std::ios::binary);
  int64_t size = 0;
  for (std::string line; std::getline(lines, line) && !lines.eof(); size += static_cast<int64_t>(line.size()) + 1) {
    long long step = 0;
    if (size > 0 && (sscanf(line.c_str(), "{\"step\":%lld", &step) != 1 || step > last_step)) break;
  }
  return size;
}

}  // namespace

std::string to_json(const Record& record) {
  // dump() writes the shortest digits that read back as the same double, and null for NaN and infinities.
  return json_of(record).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Metrics::Metrics(const std::string& folder, int64_t after_step) {
  if (folder.empty()) return;
  signal(SIGXFSZ, SIG_IGN);
  make_folder(folder);
  // Two runs would write into each other's files. The system takes the lock back when the process ends, however that
  // happens; a file system that knows no locks gives none.
  lock_ = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock_ >= 0 && flock(lock_, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK)
    RUN_ERROR("--out: another train_gpt is writing in %s; wait for its end, or choose another folder",
              in_quotes(folder).c_str());
  path_ = (fs::path(folder) / "metrics.jsonl").string();
  if (after_step == 0)
    moved_to_ = move_aside(path_);
  else
    size_ = size_up_to(path_, after_step);
  fd_ = open(path_.c_str(), O_WRONLY | O_CREAT | (after_step ? 0 : O_EXCL) | O_APPEND | O_CLOEXEC, 0644);
  if (fd_ < 0 || ftruncate(fd_, size_)) {
    RUN_ERROR("--out: cannot write %s: %s; choose a folder where you may write", in_quotes(path_).c_str(),
              strerror(errno));
  }
}

Metrics::~Metrics() {
  if (fd_ >= 0) close(fd_);
  if (lock_ >= 0) close(lock_);
}

void Metrics::write(const Record& record) {
  if (fd_ < 0) return;
  const std::string line = to_json(record) + "\n";
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t n = ::write(fd_, line.data() + done, line.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const int error = n < 0 ? errno : ENOSPC;
      // Half a line would spoil the next one. Where even this fails, the file ends in the half line.
      [[maybe_unused]] const int cut = ftruncate(fd_, size_);
      if (!warned_) {
        fprintf(stderr, "train_gpt: warning: cannot write %s: %s; training goes on, lines are missing there\n",
                path_.c_str(), strerror(error));
      }
      warned_ = true;
      return;
    }
    done += static_cast<size_t>(n);
  }
  size_ += static_cast<int64_t>(line.size());
}
