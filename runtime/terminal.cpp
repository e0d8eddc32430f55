#include "runtime/terminal.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "runtime/error.h"

namespace {

constexpr size_t max_columns = 120;

std::string position(const char* what, int64_t step, int64_t steps) {
  return strf("%s %5lld/%lld", what, static_cast<long long>(step), static_cast<long long>(steps));
}

// Fixed digits where they are readable, else an exponent: a diverging run must not fill the line.
std::string fixed_or_exponent(double x, int digits) {
  return std::abs(x) < 1e5 || !std::isfinite(x) ? strf("%.*f", digits, x) : strf("%.*e", digits, x);
}

}  // namespace

std::string step_line(const StepLine& line) {
  std::string text = position("step", line.step, line.steps);
  const auto add = [&](const std::string& field) {
    if (text.size() + 3 + field.size() <= max_columns) text += " | " + field;
  };
  add("loss " + fixed_or_exponent(line.loss, 4));
  add(strf("lr %.2e", line.lr));
  add("norm " + fixed_or_exponent(line.grad_norm, 2));
  add(human_count(std::llround(std::clamp(line.tokens_per_s, 0.0, 1e15))) + " tok/s");
  if (line.has_quality) {
    add(strf("edq %.3f", line.edq));
    add(strf("lost %.1f %%", 100 * line.lost_frac));
  }
  if (line.eta_s >= 0) add("ETA " + human_time(line.eta_s));
  return text;
}

std::string val_line(int64_t step, int64_t steps, double loss) {
  return position("val ", step, steps) + " | loss " + fixed_or_exponent(loss, 4);
}

Terminal::Terminal(FILE* out) : out_(out), tty_(isatty(fileno(out)) == 1) {}

void Terminal::step(StepLine line) {
  const auto now = std::chrono::steady_clock::now();
  if (steps_seen_++ == 0) {
    // The first step pays for set-up (primitives, page faults): the clock starts at its end.
    first_step_ = line.step;
    first_time_ = now;
  } else if (tty_) {
    const double elapsed_s = std::chrono::duration<double>(now - first_time_).count();
    line.eta_s = elapsed_s / static_cast<double>(line.step - first_step_) * static_cast<double>(line.steps - line.step);
  }
  fprintf(out_, "%s\n", step_line(line).c_str());
  fflush(out_);
}

void Terminal::val(int64_t step, int64_t steps, double loss) {
  fprintf(out_, "%s\n", val_line(step, steps, loss).c_str());
  fflush(out_);
}

std::string human_bytes(double bytes) {
  static constexpr const char* units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  size_t unit = 0;
  // 999.995 would be printed as 1000.00.
  while (bytes >= (unit == 0 ? 1000 : 999.995) && unit + 1 < std::size(units)) bytes /= 1000, unit++;
  return strf(unit == 0 ? "%.0f %s" : "%.2f %s", bytes, units[unit]);
}

std::string human_count(int64_t n) {
  std::string digits = std::to_string(n);
  const size_t sign = n < 0;
  for (size_t i = digits.size(); i > sign + 3;) digits.insert(i -= 3, 1, ',');
  return digits;
}

std::string human_time(double seconds) {
  if (!std::isfinite(seconds)) return "?";
  seconds = std::clamp(seconds, 0.0, 1e15);
  if (seconds < 9.95) return strf("%.1fs", seconds);
  const long long s = std::llround(seconds);
  if (s < 60) return strf("%llds", s);
  if (s < 3600) return strf("%lldm%02llds", s / 60, s % 60);
  if (s < 86400) return strf("%lldh%02lldm", s / 3600, s / 60 % 60);
  return strf("%lldd%02lldh", s / 86400, s / 3600 % 24);
}

std::string wrapped(const std::string& text, size_t columns) {
  std::string out, word;
  size_t column = 0, width = 0;  // of the line, of the word
  const auto flush_word = [&] {
    if (column && column + width > columns) out.back() = '\n', column = 0;  // out ends in the space before the word
    out += word, column += width;
    word.clear(), width = 0;
  };
  for (size_t i = 0; i < text.size();) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const size_t length = byte < 0x80                   ? 1
                          : byte >= 0xc2 && byte < 0xe0 ? 2
                          : byte >= 0xe0 && byte < 0xf0 ? 3
                          : byte >= 0xf0 && byte < 0xf5 ? 4
                                                        : 0;
    bool whole = length && i + length <= text.size();
    for (size_t j = 1; whole && j < length; j++) whole = (static_cast<unsigned char>(text[i + j]) & 0xc0) == 0x80;
    if (byte == '\n' || byte == ' ') {
      flush_word();
      out += text[i];
      column = byte == '\n' ? 0 : column + 1;
    } else {
      if (width == columns) flush_word(), out += '\n', column = 0;  // a word longer than a line
      word += whole && byte >= 0x20 && byte != 0x7f ? text.substr(i, length) : "?";
      width++;
    }
    i += whole ? length : 1;
  }
  flush_word();
  return out;
}
