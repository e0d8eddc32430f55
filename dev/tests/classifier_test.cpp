// fused_classifier.cuh: vocabularies of every awkward size, logits far from 0, repeatability, padding.
#include "kernels/fused_classifier.cuh"

#include <gtest/gtest.h>

#include "dev/tests/guarded.h"
#include "dev/tests/numbers.h"

namespace {

template <class T>
class Classifier : public testing::Test {};
struct Names {
  template <class T>
  static std::string GetName(int) {
    return sizeof(T) == 4 ? "fp32" : "bf16";
  }
};
using Types = testing::Types<float, bf16>;
TYPED_TEST_SUITE(Classifier, Types, Names);

constexpr int rows = 5;
constexpr float dloss = 0.25f;
constexpr int padded(int V) { return (V + 127) / 128 * 128; }

// Logits around `centre`; garbage in the padding, which must not count.
template <class T>
Guarded<T> logits_of(int V, double centre) {
  const auto Vp = static_cast<size_t>(padded(V));
  Guarded<T> logits(rows * Vp);
  for (size_t i = 0; i < rows * Vp; i++)
    store(logits[i], static_cast<float>(i % Vp < static_cast<size_t>(V) ? centre + 3 * normal(9, i) : 1e4));
  return logits;
}
std::vector<int> targets_of(int V) { return {0, V - 1, V / 2, V / 3, 1}; }

TYPED_TEST(Classifier, EveryVocabularyAgainstDouble) {
  using T = TypeParam;
  Device device;
  for (const int V : {1, 2, 97, 256, 257, 8003, 50257})
    for (const double centre : {0., -100., 300.}) {
      auto logits = logits_of<T>(V, centre);
      const auto before = logits.floats();
      auto targets = targets_of(V);
      if (V == 1) targets.assign(rows, 0);
      const int Vp = padded(V);
      Guarded<float> losses(rows);
      fused_classifier<T>(losses, logits, targets.data(), dloss, rows, V, Vp, true, device);
      for (int r = 0; r < rows; r++) {
        const float* x = &before[static_cast<size_t>(r) * Vp];
        const T* d = logits + static_cast<size_t>(r) * Vp;
        const int target = targets[static_cast<size_t>(r)];
        double max = -INFINITY, sum = 0;
        for (int v = 0; v < V; v++) max = std::max<double>(max, x[v]);
        for (int v = 0; v < V; v++) sum += std::exp(x[v] - max);
        // fp32 sums of 256 terms in 8 lanes: at most 32 half ulps of the sum. The loss is a difference of numbers of
        // the logits' size.
        const double relative = (8 + 32) * 0x1p-24;
        const double loss = std::log(sum) + max - x[target];
        EXPECT_NEAR(losses[r], loss, relative + 4 * 0x1p-24 * (std::fabs(max) + std::fabs(loss))) << V << " " << centre;
        for (int v = 0; v < V; v++) {
          const double p = std::exp(x[v] - max) / sum;
          const double expected = (p - (v == target)) * dloss;
          // Beside the sum's error: exp within 3 ulp, and the rounding to T.
          const double tolerance = p * dloss * relative + 4 * 0x1p-24 * dloss * (v == target) + 1e-37 +
                                   std::fabs(expected) * (sizeof(T) == 4 ? 0x1p-22 : 0x1p-8);
          ASSERT_NEAR(to_float(d[v]), expected, tolerance) << V << " " << centre << " row " << r << " column " << v;
        }
        for (int v = V; v < Vp; v++) ASSERT_EQ(to_float(d[v]), 0.0f) << V << " column " << v;
      }
    }
}

// The loss must be read before the logits are overwritten, scratch must not carry over, and threads must not matter.
TYPED_TEST(Classifier, FiftyRunsAreBitEqual) {
  using T = TypeParam;
  constexpr int V = 8003, Vp = padded(V);
  const auto targets = targets_of(V);
  std::string first;
  for (int run = 0; run < 50; run++) {
    Device device(1 + run % 4);
    auto logits = logits_of<T>(V, -100);
    Guarded<float> losses(rows);
    fused_classifier<T>(losses, logits, targets.data(), dloss, rows, V, Vp, true, device);
    const std::string bytes = losses.bytes() + logits.bytes();
    if (run == 0) first = bytes;
    ASSERT_TRUE(bytes == first) << "run " << run;
  }
}

// Validation asks for losses only: the same bits, and the logits stay.
TYPED_TEST(Classifier, WithoutGradientLogitsStay) {
  using T = TypeParam;
  Device device;
  constexpr int V = 257, Vp = padded(V);
  const auto targets = targets_of(V);
  auto kept = logits_of<T>(V, -100), used = logits_of<T>(V, -100);
  const std::string before = kept.bytes();
  Guarded<float> losses(rows), trained(rows);
  fused_classifier<T>(losses, kept, targets.data(), 0.0f, rows, V, Vp, false, device);
  fused_classifier<T>(trained, used, targets.data(), dloss, rows, V, Vp, true, device);
  EXPECT_TRUE(kept.bytes() == before);
  EXPECT_TRUE(losses.bytes() == trained.bytes());
}

// A loss that is not finite, by a NaN or by a target whose logit is -inf, makes its own row's gradient NaN, so that the
// gradient's norm shows it, and no other row's.
TYPED_TEST(Classifier, WhatIsNotFiniteStaysInItsRow) {
  using T = TypeParam;
  Device device;
  constexpr int V = 97, Vp = padded(V);
  const auto targets = targets_of(V);
  auto logits = logits_of<T>(V, 0);
  store(logits[2 * Vp + 5], NAN);
  store(logits[3 * Vp + targets[3]], -INFINITY);
  Guarded<float> losses(rows);
  fused_classifier<T>(losses, logits, targets.data(), dloss, rows, V, Vp, true, device);
  for (int r = 0; r < rows; r++) {
    const bool bad = r == 2 || r == 3;
    EXPECT_EQ(std::isfinite(losses[r]), !bad) << r;
    for (int v = 0; v < V; v++) EXPECT_EQ(std::isnan(to_float(logits[r * Vp + v])), bad) << r << " " << v;
    for (int v = V; v < Vp; v++) EXPECT_EQ(to_float(logits[r * Vp + v]), 0.0f) << r << " " << v;
  }
}

}  // namespace
