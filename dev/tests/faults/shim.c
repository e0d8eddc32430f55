// LD_PRELOAD library that makes file operations of a program fail, or ends the program at one of them.
//
// It counts the calls that change what lies below one folder: open for writing, write, truncate, sync, rename, mkdir,
// remove. stdio's are not seen: they stay inside libc. From the environment:
//   FAULT_FOLDER=path   absolute; what lies elsewhere is left alone
//   FAULT_AT=N          the call that is meant, from 1
//   FAULT_DO=kill       SIGKILL to the own process in place of call N
//            killafter  after call N
//            short      after half the bytes of call N; like kill where it writes none
//            stop       SIGSTOP before call N, which is made after SIGCONT
//            half       from call N on a write writes half of its bytes, and returns how many
//            ENOSPC ... from call N on calls fail with this error, those that can have it
//   FAULT_UNTIL=M       half and errors end with call M
//   FAULT_LOG=file      a line for each call: "rename path"
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum Kind { OPEN, WRITE, TRUNCATE, SYNC, RENAME, MKDIR, REMOVE };
static const char* const kind_names[] = {"open", "write", "truncate", "sync", "rename", "mkdir", "remove"};
enum Action { GO_ON, FAIL, HALF, HALF_THEN_KILL, THEN_KILL };

// A full disk still takes removals. A disk that is read only now does not touch files that are open.
static const struct Error {
  const char* name;
  int number;
  unsigned kinds;
} errors[] = {
    {"ENOSPC", ENOSPC, ~(1u << REMOVE)},
    {"EDQUOT", EDQUOT, ~(1u << REMOVE)},
    {"EIO", EIO, ~0u},
    {"EINTR", EINTR, 1u << OPEN | 1u << WRITE | 1u << SYNC},
    {"EROFS", EROFS, 1u << OPEN | 1u << RENAME | 1u << MKDIR | 1u << REMOVE},
};

static atomic_long calls;

static long number(const char* variable, long otherwise) {
  const char* text = getenv(variable);
  return text ? atol(text) : otherwise;
}

// To this thread, so that none of it comes after.
static void signal_self(int signal) { syscall(SYS_tgkill, getpid(), (int)syscall(SYS_gettid), signal); }

static void kill_self(void) {
  signal_self(SIGKILL);
  for (;;) pause();
}

// The path in full: "" names the descriptor itself. Not normalised.
static void full_path(char* full, int fd, const char* path) {
  *full = 0;
  if (*path != '/') {
    char link[64];
    snprintf(link, sizeof link, fd == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", fd);
    const ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, full, PATH_MAX - 1);
    full[n < 0 ? 0 : n] = 0;
    if (*path) strncat(full, "/", PATH_MAX - 1 - strlen(full));
  }
  strncat(full, path, PATH_MAX - 1 - strlen(full));
}

// Counts this call if it concerns the folder, and says what becomes of it. FAIL sets errno; a kill may not return.
static enum Action begin(enum Kind kind, int fd, const char* path) {
  const char* folder = getenv("FAULT_FOLDER");
  const int old_errno = errno;
  char full[PATH_MAX];
  if (!folder) return GO_ON;
  full_path(full, fd, path);
  errno = old_errno;
  if (strncmp(full, folder, strlen(folder)) != 0) return GO_ON;
  const long call = atomic_fetch_add(&calls, 1) + 1;
  if (getenv("FAULT_LOG")) {
    char line[PATH_MAX + 16];
    const int n = snprintf(line, sizeof line, "%s %s\n", kind_names[kind], full);
    const int log = (int)syscall(SYS_openat, AT_FDCWD, getenv("FAULT_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (log < 0 || syscall(SYS_write, log, line, n) != n) abort();
    syscall(SYS_close, log);
  }
  const long at = number("FAULT_AT", 0);
  const char* what = getenv("FAULT_DO");
  if (!at || !what || call < at || call > number("FAULT_UNTIL", LONG_MAX)) return GO_ON;
  if (strcmp(what, "half") == 0) return HALF;
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
    if (strcmp(what, errors[i].name) != 0) continue;
    if (!(errors[i].kinds >> kind & 1)) return GO_ON;
    errno = errors[i].number;
    return FAIL;
  }
  if (call > at) return GO_ON;
  if (strcmp(what, "stop") == 0) return signal_self(SIGSTOP), GO_ON;
  if (strcmp(what, "killafter") == 0) return THEN_KILL;
  if (strcmp(what, "short") == 0 && kind == WRITE) return HALF_THEN_KILL;
  kill_self();
  return GO_ON;
}

static long end(enum Action action, long result) {
  if (action == HALF_THEN_KILL || action == THEN_KILL) kill_self();
  return result;
}

// A function that makes one system call if it may.
#define CALL(kind, fd, path, ...)                   \
  const enum Action action = begin(kind, fd, path); \
  if (action == FAIL) return -1;                    \
  return end(action, syscall(__VA_ARGS__))
// The same for one that writes n bytes.
#define CALL_WRITE(fd, n, ...)                                                            \
  const enum Action action = begin(WRITE, fd, "");                                        \
  if (action == FAIL) return -1;                                                          \
  if (action == HALF || action == HALF_THEN_KILL) n = n / 2 + (action == HALF && n == 1); \
  return end(action, syscall(__VA_ARGS__))

static int open_it(int fd, const char* path, int flags, mode_t mode) {
  if ((flags & O_ACCMODE) == O_RDONLY) return (int)syscall(SYS_openat, fd, path, flags, mode);
  CALL(OPEN, fd, path, SYS_openat, fd, path, flags, mode);
}

#define MODE(flags)                                                   \
  mode_t mode = 0;                                                    \
  if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {          \
    va_list rest;                                                     \
    va_start(rest, flags), mode = va_arg(rest, mode_t), va_end(rest); \
  }
int open(const char* path, int flags, ...) { MODE(flags) return open_it(AT_FDCWD, path, flags, mode); }
int open64(const char* path, int flags, ...) { MODE(flags) return open_it(AT_FDCWD, path, flags, mode); }
int openat(int fd, const char* path, int flags, ...) { MODE(flags) return open_it(fd, path, flags, mode); }
int openat64(int fd, const char* path, int flags, ...) { MODE(flags) return open_it(fd, path, flags, mode); }
int creat(const char* path, mode_t mode) { return open_it(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char* path, mode_t mode) { return creat(path, mode); }

ssize_t write(int fd, const void* from, size_t n) { CALL_WRITE(fd, n, SYS_write, fd, from, n); }
ssize_t pwrite(int fd, const void* from, size_t n, off_t at) { CALL_WRITE(fd, n, SYS_pwrite64, fd, from, n, at); }
ssize_t pwrite64(int fd, const void* from, size_t n, off64_t at) { return pwrite(fd, from, n, at); }
ssize_t writev(int fd, const struct iovec* from, int n) {  // half of the pieces
  CALL_WRITE(fd, n, SYS_writev, fd, from, n);
}

int ftruncate(int fd, off_t n) { CALL(TRUNCATE, fd, "", SYS_ftruncate, fd, n); }
int ftruncate64(int fd, off64_t n) { return ftruncate(fd, n); }
int truncate(const char* path, off_t n) { CALL(TRUNCATE, AT_FDCWD, path, SYS_truncate, path, n); }
int truncate64(const char* path, off64_t n) { return truncate(path, n); }

int fsync(int fd) { CALL(SYNC, fd, "", SYS_fsync, fd); }
int fdatasync(int fd) { CALL(SYNC, fd, "", SYS_fdatasync, fd); }

int renameat2(int from_fd, const char* from, int to_fd, const char* to, unsigned flags) {
  CALL(RENAME, from_fd, from, SYS_renameat2, from_fd, from, to_fd, to, flags);
}
int renameat(int from_fd, const char* from, int to_fd, const char* to) {
  return renameat2(from_fd, from, to_fd, to, 0);
}
int rename(const char* from, const char* to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

int mkdirat(int fd, const char* path, mode_t mode) { CALL(MKDIR, fd, path, SYS_mkdirat, fd, path, mode); }
int mkdir(const char* path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int unlinkat(int fd, const char* path, int flags) { CALL(REMOVE, fd, path, SYS_unlinkat, fd, path, flags); }
int unlink(const char* path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char* path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char* path) {
  const int done = unlink(path);
  return done != 0 && errno == EISDIR ? rmdir(path) : done;
}
