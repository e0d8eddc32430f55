// Errors a user can meet, and the one way to raise them.
//
// A message is one line: what, what was found, what was expected, a hint. main() prints "train_gpt: error: <line>" and
// exits with 2 for a usage error (a flag is wrong), with 1 for a run-time error (a file, a device, the machine).
// CHECK is for the program's own mistakes: always on, never reached by bad input.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct RunError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// printf into a std::string.
[[gnu::format(printf, 1, 2)]] inline std::string strf(const char* format, ...) {
  va_list args, again;
  va_start(args, format);
  va_copy(again, args);
  std::string s(static_cast<size_t>(vsnprintf(nullptr, 0, format, again)), '\0');
  va_end(again);
  vsnprintf(s.data(), s.size() + 1, format, args);
  va_end(args);
  return s;
}

// Throws RunError / UsageError with a printf-style message.
#define RUN_ERROR(...) throw RunError(strf(__VA_ARGS__))
#define USAGE_ERROR(...) throw UsageError(strf(__VA_ARGS__))

#define CHECK(condition, ...)                                                                                      \
  do {                                                                                                             \
    if (!(condition)) {                                                                                            \
      fprintf(stderr, "%s:%d: CHECK(%s) failed: %s\n", __FILE__, __LINE__, #condition, strf(__VA_ARGS__).c_str()); \
      abort();                                                                                                     \
    }                                                                                                              \
  } while (0)
