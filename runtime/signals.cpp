#include "runtime/signals.h"

#include <unistd.h>

#include <csignal>
#include <cstring>
#include <initializer_list>

namespace {

volatile sig_atomic_t stop_signal = 0, save_signal = 0;

void note(int signal) {
  if (signal == SIGUSR1) {
    save_signal = 1;
    return;
  }
  if (stop_signal) _exit(128 + signal);
  stop_signal = signal;
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
  save_signal = 0;
  return noted;
}
