// What a run prints: the lines of the contract, never wider than 120 columns, and readable quantities.
#include "runtime/terminal.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "runtime/error.h"

namespace {

StepLine example() {
  return {.step = 10,
          .steps = 200,
          .loss = 3.1234,
          .lr = 3e-4,
          .grad_norm = 1.23,
          .tokens_per_s = 12345,
          .has_quality = true,
          .edq = 0.998,
          .lost_frac = 0.123,
          .eta_s = 92};
}

}  // namespace

TEST(Terminal, StepLine) {
  StepLine line = example();
  EXPECT_EQ(step_line(line),
            "step    10/200 | loss 3.1234 | lr 3.00e-04 | norm 1.23 | 12,345 tok/s | edq 0.998 | "
            "lost 12.3 % | ETA 1m32s");
  line.eta_s = -1, line.has_quality = false;
  EXPECT_EQ(step_line(line), "step    10/200 | loss 3.1234 | lr 3.00e-04 | norm 1.23 | 12,345 tok/s");
  EXPECT_EQ(val_line(10, 200, 2.5), "val     10/200 | loss 2.5000");
}

TEST(Terminal, NeverWiderThan120Columns) {
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<double> values = {0, -1e308, 1e308, NAN, inf, -inf, 99999.99999, -1e-300, 1e18};
  for (double a : values) {
    for (double b : values) {
      StepLine line = {.step = 999999999,
                       .steps = 1000000000,
                       .loss = a,
                       .lr = b,
                       .grad_norm = a,
                       .tokens_per_s = b,
                       .has_quality = true,
                       .edq = a,
                       .lost_frac = b,
                       .eta_s = a};
      EXPECT_LE(step_line(line).size(), 120u) << step_line(line);
      EXPECT_NE(step_line(line).find(" | loss "), std::string::npos);
      EXPECT_LE(val_line(999999999, 1000000000, a).size(), 120u);
    }
  }
}

TEST(Terminal, AFileGetsOneLineAStepAndNoEta) {
  FILE* file = tmpfile();
  Terminal terminal(file);
  EXPECT_FALSE(terminal.is_tty());
  StepLine line = example();
  line.eta_s = -1;
  for (line.step = 1; line.step <= 3; line.step++) terminal.step(line);
  terminal.val(3, 200, 2.5);
  rewind(file);
  char text[1000] = {};
  const size_t n = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  EXPECT_EQ(std::count(text, text + n, '\n'), 4);
  EXPECT_EQ(std::string(text).find("ETA"), std::string::npos);
  EXPECT_EQ(std::string(text).find('\r'), std::string::npos);
  EXPECT_EQ(std::string(text).find("step     1/200 | "), 0u) << text;
}

TEST(Terminal, HumanCount) {
  EXPECT_EQ(human_count(0), "0");
  EXPECT_EQ(human_count(999), "999");
  EXPECT_EQ(human_count(1000), "1,000");
  EXPECT_EQ(human_count(1234567), "1,234,567");
  EXPECT_EQ(human_count(-999), "-999");
  EXPECT_EQ(human_count(-1000), "-1,000");
  EXPECT_EQ(human_count(INT64_MIN), "-9,223,372,036,854,775,808");
}

TEST(Terminal, HumanBytes) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(999), "999 B");
  EXPECT_EQ(human_bytes(1000), "1.00 kB");
  EXPECT_EQ(human_bytes(999994), "999.99 kB");
  EXPECT_EQ(human_bytes(999996), "1.00 MB");
  EXPECT_EQ(human_bytes(1.5e9), "1.50 GB");
  EXPECT_EQ(human_bytes(2e18), "2000.00 PB");
}

TEST(Terminal, HumanTime) {
  EXPECT_EQ(human_time(0), "0.0s");
  EXPECT_EQ(human_time(9.94), "9.9s");
  EXPECT_EQ(human_time(9.96), "10s");
  EXPECT_EQ(human_time(59.6), "1m00s");
  EXPECT_EQ(human_time(92), "1m32s");
  EXPECT_EQ(human_time(7500), "2h05m");
  EXPECT_EQ(human_time(3 * 86400 + 4 * 3600), "3d04h");
  EXPECT_EQ(human_time(NAN), "?");
}
