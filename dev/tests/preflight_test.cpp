// Warnings from the flags alone: each where it should be, for every precision, and none in a default run.
#include "runtime/preflight.h"

#include <gtest/gtest.h>

#include <sstream>

namespace {

const std::vector<std::string> all = {"bf16",       "bf16_kahan",  "bf16_sr",    "collage_light", "collage_plus",
                                      "fp32_optim", "fp32_master", "bf16_rem16", "bf16_int8",     "fp32"};

// The precisions that a warning with this word in it comes up for.
std::string warned(Options o, const std::string& word) {
  std::string names;
  for (const auto& precision : all) {
    o.precision = precision;
    for (const auto& warning : preflight_warnings(o))
      if (warning.find(word) != std::string::npos) names += (names.empty() ? "" : " ") + precision;
  }
  return names;
}
Options with_lr(double lr) {
  Options o;
  o.lr = lr;
  return o;
}
Options with_beta2(double beta2) {
  Options o;
  o.beta2 = beta2;
  return o;
}

}  // namespace

TEST(Preflight, TheDefaultRunHasNoWarning) {
  EXPECT_EQ(Options().precision, "collage_plus");
  EXPECT_EQ(preflight_text(Options()), "");
  // Only a weight of 8 bits of significand loses something at the default flags.
  for (const char* word : {"--beta2", "--warmup"}) EXPECT_EQ(warned(Options(), word), "");
  for (const char* word : {"--lr", "--weight-decay"}) EXPECT_EQ(warned(Options(), word), "bf16 fp32_optim");
}

TEST(Preflight, SecondMomentOfOneBf16) {
  const std::string one_bf16 = "bf16 bf16_kahan collage_light bf16_rem16 bf16_int8";
  EXPECT_EQ(warned(with_beta2(.98), "--beta2"), "");
  EXPECT_EQ(warned(with_beta2(.99), "drifts"), one_bf16);
  EXPECT_EQ(warned(with_beta2(.995), "drifts"), one_bf16);
  EXPECT_EQ(warned(with_beta2(.999), "drifts"), "");
  EXPECT_EQ(warned(with_beta2(.999), "rounds to 1"), one_bf16);
  // bf16 rounds to 1 from 1 - 2^-9 on: half way between 1 - 2^-8 and 1, and the tie goes to even.
  EXPECT_EQ(warned(with_beta2(1 - 0x1p-9), "rounds to 1"), one_bf16);
  EXPECT_EQ(warned(with_beta2(1 - 0x1.01p-9), "rounds to 1"), "");
}

TEST(Preflight, DecayBelowTheResolution) {
  // lr * wd on both sides of 2^-9, 2^-16, 2^-17, 2^-24. Stochastic rounding keeps it in the mean.
  const auto decay = [](double lr_wd) {
    Options o;
    o.lr = 0.01, o.lr_schedule = "constant", o.weight_decay = lr_wd / o.lr;
    return warned(o, "--weight-decay");
  };
  EXPECT_EQ(decay(0x1.1p-9), "");
  EXPECT_EQ(decay(0x1.fp-10), "bf16 fp32_optim");
  EXPECT_EQ(decay(0x1.1p-16), "bf16 fp32_optim");
  EXPECT_EQ(decay(0x1.fp-17), "bf16 fp32_optim bf16_int8");
  EXPECT_EQ(decay(0x1.fp-18), "bf16 bf16_kahan collage_light collage_plus fp32_optim bf16_int8");
  EXPECT_EQ(decay(0x1.1p-24), "bf16 bf16_kahan collage_light collage_plus fp32_optim bf16_int8");
  EXPECT_EQ(decay(0x1.fp-25),
            "bf16 bf16_kahan collage_light collage_plus fp32_optim fp32_master bf16_rem16 bf16_int8 fp32");
  EXPECT_EQ(decay(0), "");  // no decay, nothing to lose
}

TEST(Preflight, WeightsThatCannotMove) {
  EXPECT_EQ(warned(with_lr(0x1.1p-5), "--lr"), "");                       // and a tenth of it is above 2^-9
  EXPECT_EQ(warned(with_lr(1e-4), "--lr"), "bf16 fp32_optim bf16_int8");  // 1e-5 at the end, below 2^-16
  EXPECT_EQ(warned(with_lr(5e-5), "--lr"), "bf16 bf16_kahan collage_light collage_plus fp32_optim bf16_int8");
  EXPECT_EQ(warned(with_lr(1e-8), "--lr"),
            "bf16 bf16_kahan collage_light collage_plus fp32_optim fp32_master bf16_rem16 bf16_int8 fp32");
  Options o = with_lr(5e-5);
  o.lr_schedule = "constant";
  EXPECT_EQ(warned(o, "--lr"), "bf16 fp32_optim");
  o.lr_schedule = "cosine", o.final_lr_frac = 0;  // at 0 everything stands still: not the precision's doing
  EXPECT_EQ(warned(o, "--lr"), "bf16 fp32_optim");

  // The share is that of |x| > lr * 2^9 for N(0, 0.02): 3e-5 * 512 = 0.01536 is 0.768 sigma, and 44 % lie beyond.
  o = Options();
  o.precision = "bf16";
  EXPECT_NE(preflight_warnings(o).back().find("0 % can't at the peak, 44 % at the final lr 3e-05"), std::string::npos);
  EXPECT_NE(preflight_warnings(o).back().find("Choose collage_plus (2^-17) or fp32_master"), std::string::npos);
  o.lr = 1e-5;  // and 1e-6 at the end: a pair does not keep that
  EXPECT_NE(preflight_warnings(o).back().find("Choose fp32_master"), std::string::npos);
}

TEST(Preflight, TheRestOfTheFlags) {
  Options released;
  released.mcf = "as-released";
  EXPECT_EQ(warned(released, "--mcf"), "collage_plus");
  released.mcf = "fused";
  EXPECT_EQ(warned(released, "--mcf"), "");
  EXPECT_EQ(preflight_warnings(with_lr(0)).size(), 1u);
  Options o;
  o.warmup_steps = 100;
  EXPECT_EQ(preflight_text(o), "");  // steps not known
  o.steps = 101;
  EXPECT_EQ(preflight_text(o), "");
  o.steps = 100;
  EXPECT_NE(preflight_text(o).find("--warmup-steps=100"), std::string::npos);
  o.precision = "bf16", o.eval_only = true;
  EXPECT_EQ(preflight_text(o), "");  // nothing is updated
}

TEST(Preflight, LinesFitTheTerminal) {
  Options o;
  o.lr = 1.23456789e-9, o.weight_decay = 1e-9, o.beta2 = 0.9999, o.steps = 5, o.warmup_steps = 1'000'000'000;
  for (const auto& precision : all) {
    o.precision = precision;
    std::istringstream text(preflight_text(o));
    for (std::string line; std::getline(text, line);) {
      EXPECT_LT(line.size(), 120u) << line;
      EXPECT_TRUE(line.starts_with("warning    ") || line.starts_with(std::string(11, ' '))) << line;
    }
  }
}
