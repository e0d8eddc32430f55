// The learning rate: its ends, its shape, and the runs that are too short for a shape.
#include "runtime/schedule.h"

#include <gtest/gtest.h>

namespace {

Options schedule(const char* name, int64_t warmup) {
  Options options;
  options.lr = 1;
  options.lr_schedule = name;
  options.warmup_steps = warmup;
  return options;
}

// Values are sums of a few doubles near 1, each off by at most 2^-53.
constexpr double tolerance = 1e-15;

}  // namespace

TEST(Schedule, WarmUpGrowsFromOneShareToAll) {
  for (const char* name : {"cosine", "linear", "constant", "wsd"}) {
    const Options o = schedule(name, 4);
    EXPECT_EQ(learning_rate(o, 0, 100), 0.25) << name;
    EXPECT_EQ(learning_rate(o, 1, 100), 0.5) << name;
    EXPECT_EQ(learning_rate(o, 3, 100), 1.0) << name;
  }
}

TEST(Schedule, EndsAtTheFinalFraction) {
  for (const char* name : {"cosine", "linear", "wsd"}) {
    for (int64_t warmup : {0, 1, 5, 99}) {
      EXPECT_NEAR(learning_rate(schedule(name, warmup), 99, 100), 0.1, tolerance) << name << " " << warmup;
    }
  }
  EXPECT_EQ(learning_rate(schedule("constant", 5), 99, 100), 1.0);
}

TEST(Schedule, KnownPoints) {
  // 11 steps: step 5 is the middle of the decay, where cosine and linear meet.
  EXPECT_EQ(learning_rate(schedule("cosine", 0), 0, 11), 1.0);
  EXPECT_NEAR(learning_rate(schedule("cosine", 0), 5, 11), 0.55, tolerance);
  EXPECT_NEAR(learning_rate(schedule("linear", 0), 5, 11), 0.55, tolerance);
  EXPECT_NEAR(learning_rate(schedule("linear", 0), 1, 11), 0.91, tolerance);
  // A third of the way, cos(pi/3) = 1/2: weight 3/4.
  EXPECT_NEAR(learning_rate(schedule("cosine", 0), 3, 10), 0.1 + 0.9 * 0.75, tolerance);
}

TEST(Schedule, WsdDecaysOverTheLastFifth) {
  const Options o = schedule("wsd", 3);
  EXPECT_EQ(learning_rate(o, 3, 100), 1.0);
  EXPECT_EQ(learning_rate(o, 79, 100), 1.0);
  EXPECT_NEAR(learning_rate(o, 80, 100), 1 - 0.9 / 20, tolerance);
  EXPECT_NEAR(learning_rate(o, 89, 100), 0.55, tolerance);
  EXPECT_NEAR(learning_rate(schedule("wsd", 90), 94, 100), 1 - 0.9 * 0.5, tolerance);  // warm-up took half of the fifth
}

TEST(Schedule, NeverRisesAfterWarmUpAndNeverLeavesItsRange) {
  for (const char* name : {"cosine", "linear", "constant", "wsd"}) {
    for (int64_t steps = 1; steps <= 40; steps++) {
      for (int64_t warmup = 0; warmup <= 45; warmup++) {
        const Options o = schedule(name, warmup);
        double previous = 1;
        for (int64_t step = 0; step < steps; step++) {
          const double lr = learning_rate(o, step, steps);
          if (step < warmup) {
            EXPECT_EQ(lr, static_cast<double>(step + 1) / static_cast<double>(warmup));
            continue;
          }
          EXPECT_LE(lr, previous) << name << " " << step << "/" << steps << " warm-up " << warmup;
          EXPECT_GE(lr, 0.1 - tolerance) << name << " " << step << "/" << steps << " warm-up " << warmup;
          previous = lr;
        }
      }
    }
  }
}

TEST(Schedule, ShortRuns) {
  for (const char* name : {"cosine", "linear", "constant", "wsd"}) {
    EXPECT_EQ(learning_rate(schedule(name, 0), 0, 1), 1.0) << name;
    EXPECT_EQ(learning_rate(schedule(name, 10), 0, 1), 0.1) << name;  // ends inside warm-up
    EXPECT_EQ(learning_rate(schedule(name, 2), 1, 2), 1.0) << name;
  }
}
