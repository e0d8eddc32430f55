// What a run prints while it goes: one line a step, at most 120 columns, into a terminal, a file or a pipe alike. On a
// terminal each line also says how long the rest will take.
#pragma once
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

struct StepLine {
  int64_t step = 0;   // 1-based: updates done
  int64_t steps = 0;  // of the whole run
  double loss = 0;
  double lr = 0;
  double grad_norm = 0;
  double tokens_per_s = 0;
  bool has_quality = false;  // edq and lost_frac were computed in this step
  double edq = 0;
  double lost_frac = 0;  // 0 to 1
  double eta_s = -1;     // seconds to the end; -1 = unknown, not shown
};

// "step    10/200 | loss 3.1234 | lr 3.00e-04 | norm 1.23 | 12,345 tok/s | edq 0.998 | lost 12.3 % | ETA 1m32s".
// Fields that would pass column 120 are left out from the right.
std::string step_line(const StepLine& line);
std::string val_line(int64_t step, int64_t steps, double loss);

// Prints lines as they come and estimates the time left from the time between steps, validation included.
class Terminal {
 public:
  explicit Terminal(FILE* out = stdout);
  void step(StepLine line);
  void val(int64_t step, int64_t steps, double loss);
  bool is_tty() const { return tty_; }

 private:
  FILE* out_;
  bool tty_;
  int64_t first_step_ = -1, steps_seen_ = 0;
  std::chrono::steady_clock::time_point first_time_;
};

std::string human_bytes(double bytes);   // "1.50 GB", powers of 1000; exact below 1000: "999 B"
std::string human_count(int64_t n);      // "12,345"
std::string human_time(double seconds);  // "0.5s", "32s", "1m32s", "2h05m", "3d04h"
// Text from a model for a terminal: lines broken at spaces to `columns`, control characters as '?', bytes that are not
// UTF-8 as '?'.
std::string wrapped(const std::string& text, size_t columns);
