// The learning rate of each step.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

#include "runtime/options.h"

// Learning rate of optimizer step `step` (0-based) of `steps`. During warm-up it grows linearly and reaches --lr at the
// last warm-up step: lr*(step+1)/warmup. Then, with f = --final-lr-frac:
//   cosine, linear  fall from lr at the last warm-up step (without warm-up: at step 0) to lr*f at the last step
//   constant        lr
//   wsd             lr (stable), then over the last fifth of all steps, rounded up, a straight line to lr*f at the last
//                   step; warm-up, where it reaches into that fifth, goes first
// A warm-up of `steps` or more leaves the decay no step: the run ends while it warms up. A single step without warm-up
// takes lr.
inline double learning_rate(const Options& options, int64_t step, int64_t steps) {
  const double lr = options.lr;
  const int64_t warmup = options.warmup_steps;
  if (step < warmup) return lr * static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (options.lr_schedule == "constant") return lr;

  // The decay runs from lr at step `first` to lr*f at step `last`.
  const int64_t last = steps - 1;
  int64_t first = std::max<int64_t>(0, warmup - 1);
  if (options.lr_schedule == "wsd") first = std::max(first, last - (steps + 4) / 5);
  if (step <= first) return lr;
  const double x = std::min(1.0, static_cast<double>(step - first) / static_cast<double>(last - first));
  const double weight = options.lr_schedule == "cosine" ? 0.5 * (1 + std::cos(std::numbers::pi * x)) : 1 - x;
  return lr * (options.final_lr_frac + (1 - options.final_lr_frac) * weight);
}
