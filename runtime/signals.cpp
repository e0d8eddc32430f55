#include "runtime/signals.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <initializer_list>

namespace {

volatile sig_atomic_t stop_signal = 0, save_signal = 0;
std::atomic<int64_t> stop_ns = 0;  // when it came
constexpr int64_t echo_ns = 100'000'000;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec;
}

void note(int signal) {
  if (signal == SIGUSR1) {
    save_signal = 1;
    return;
  }
  if (stop_signal) {
    if (now_ns() - stop_ns > echo_ns) _exit(128 + signal);
    return;  // the same request: timeout(1) signals its child, and then the group that it is in
  }
  stop_ns = now_ns();
  stop_signal = signal;
  std::signal(SIGPIPE, SIG_IGN);  // Ctrl-C ends what reads the output too, "| tee log", and the state is not saved yet
  constexpr char line[] = "train_gpt: stops after this step; the same signal again ends it at once\n";
  [[maybe_unused]] const ssize_t n = write(STDERR_FILENO, line, sizeof line - 1);
}

}  // namespace

void watch_signals() {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaction(signal, &action, nullptr);
}

Signals noted_signals() {
  const Signals noted{stop_signal, save_signal != 0};
  if (noted.save) save_signal = 0;  // else one that came since would be lost
  return noted;
}
