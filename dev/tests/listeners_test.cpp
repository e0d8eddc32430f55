// listeners.cuh, shadow.cuh, gradient_sum.cuh: what stands around the optimizer. How a run uses them is
// training_test.py's business.
#include "mcf/listeners.cuh"

#include <gtest/gtest.h>

#include <numeric>

#include "dev/tests/numbers.h"
#include "dev/tests/optimizing.h"
#include "kernels/gradient_sum.cuh"

namespace {

// Two tensors, the first decayed, several blocks.
struct Flat {
  std::vector<Block> blocks;
  size_t n = 0;
  Flat() {
    for (const size_t size : {2 * block_elements + 77, block_elements / 2}) {
      append_blocks(blocks, n, size, n == 0);
      n += (size + tensor_alignment - 1) / tensor_alignment * tensor_alignment;
    }
  }
  template <class floatX>
  std::vector<floatX> random(uint64_t key, double size) const {
    std::vector<floatX> x(n);
    for (const Block& b : blocks)
      for (size_t i = b.begin; i < b.begin + b.n; i++) store(x[i], rn(static_cast<float>(size * normal(key, i))));
    return x;
  }
};

template <class S>
class Listening : public testing::Test {};
TYPED_TEST_SUITE(Listening, StrategyTypes, StrategyNames);

// fp32_master and fp32 are off by fp32's rounding only; of the others each drift is what its format makes of it, and m,
// which is stored alike, drifts alike. The numbers are bounds for 30 steps, a factor two above what they measure.
TYPED_TEST(Listening, TheShadowSeesHowFarAStrategyIsOff) {
  using S = TypeParam;
  using floatX = typename S::Theta;
  Device device(2);
  const Flat flat;
  const BlockList blocks(flat.blocks, device);
  auto theta = flat.random<floatX>(1, .02);
  Shadow<floatX> shadow(16, theta.data(), blocks, flat.n, device);
  EXPECT_NEAR(static_cast<double>(shadow.size()), static_cast<double>(flat.n) / 16, flat.n / 160.0);
  AdamW<S> adamw(theta.data(), blocks, flat.n, device);
  for (int64_t t = 1; t <= 30; t++) {
    const auto grads = flat.random<floatX>(1 + static_cast<uint64_t>(t), 1e-3);
    const AdamWScalars k = adamw_scalars(1e-3, .9, .95, 1e-8, .1, 1, 2, t, 1);
    update<floatX>(adamw, theta.data(), grads.data(), k, 1, 2, false, device);
    shadow.update(grads.data(), 1e-3, .9, .95, 1e-8, .1, .5, t, device);
  }
  DriftSums d;
  for (const auto& block : shadow.compare(adamw, theta.data(), device)) d += block;
  const bool fp32_states = std::is_same_v<std::tuple_element_t<S::second_moment, typename S::States>, float>;
  const bool pair_v = std::tuple_size_v<typename S::States> - S::second_moment == 2;
  const bool as_released = S::mode == std::string("as-released");
  const double weight = drift(d.weight, d.travelled), m = drift(d.m, d.m_size), v = drift(d.v, d.v_size);
  EXPECT_LT(m, fp32_states ? 1e-6 : .015);
  EXPECT_LT(v, fp32_states ? 1e-6 : as_released ? .8 : pair_v ? 2e-3 : S::stochastic ? .03 : .02);
  EXPECT_GT(v, as_released ? .1 : 0);
  const bool plain = std::is_base_of_v<PlainWeight, S>;
  EXPECT_LT(weight, plain ? .3 : fp32_states ? 1e-5 : as_released ? .5 : .02);
  EXPECT_GT(weight, plain ? .01 : 0);
}

// Values read from an optimizer and set in another of the same strategy are the same values.
TYPED_TEST(Listening, ValuesComeBack) {
  using S = TypeParam;
  using floatX = typename S::Theta;
  Device device(1);
  const Flat flat;
  const BlockList blocks(flat.blocks, device);
  auto theta = flat.random<floatX>(1, .02);
  AdamW<S> adamw(theta.data(), blocks, flat.n, device);
  for (int64_t t = 1; t <= 5; t++)
    update<floatX>(adamw, theta.data(), flat.random<floatX>(1 + static_cast<uint64_t>(t), 1e-3).data(),
                   adamw_scalars(1e-3, .9, .95, 1e-8, .1, 0, 0, t, 1), 0, 0, false, device);
  std::vector<size_t> at(flat.n);
  std::iota(at.begin(), at.end(), 0);
  const auto before = adamw.values(theta.data(), at.data(), at.size(), device);
  auto copy = theta;
  AdamW<S> other(copy.data(), blocks, flat.n, device);
  other.write(copy.data(), 0, stored_values<S>(before), device);
  const auto after = other.values(copy.data(), at.data(), at.size(), device);
  EXPECT_EQ(before.weight, after.weight);
  EXPECT_EQ(before.m, after.m);
  EXPECT_EQ(before.v, after.v);
}

// Sums of 64 gradients against double. The last rounding takes 2^-8 of the sum at most, half an ulp just above a power of
// two; before it fp32 loses 64 times 2^-24 of the magnitudes at most, a pair 64 times 2^-17. In bf16 itself each of 64
// additions rounds.
TEST(GradientSum, KeepsWhatBf16Loses) {
  constexpr size_t n = 4096;
  constexpr int micro_batches = 64;
  Device device(2);
  std::vector<double> exact(n), magnitude(n);
  std::vector<float> plain(n);
  GradientSum fp32("fp32", n, device), pair("pair", n, device), none("bf16", n, device);
  EXPECT_FALSE(none.active());
  EXPECT_EQ(device.bytes(Memory::gradients),
            static_cast<int64_t>(n) * (GradientSum::bytes("fp32") + GradientSum::bytes("pair")));
  std::vector<bf16> in_fp32(n), in_pair(n);
  for (int round = 0; round < 2; round++) {  // twice: the sums start over
    std::fill(exact.begin(), exact.end(), 0), std::fill(magnitude.begin(), magnitude.end(), 0);
    std::fill(plain.begin(), plain.end(), 0.0f);
    for (int micro = 0; micro < micro_batches; micro++) {
      const bool last = micro + 1 == micro_batches;
      for (size_t i = 0; i < n; i++) {
        store(in_fp32[i], static_cast<float>(normal(static_cast<uint64_t>(100 * round + micro), i)));
        const float g = to_float(in_fp32[i]);
        exact[i] += g, magnitude[i] += std::fabs(g), plain[i] = rn(plain[i] + g);
      }
      in_pair = in_fp32;
      fp32.add(in_fp32.data(), 0, n, last, device);
      pair.add(in_pair.data(), 0, n, last, device);
      for (size_t i = 0; i < n && !last; i++) ASSERT_TRUE(in_fp32[i].bits == 0 && in_pair[i].bits == 0);
    }
    double plain_off = 0, fp32_off = 0, pair_off = 0;
    for (size_t i = 0; i < n; i++) {
      const double bound = std::fabs(exact[i]) * 0x1p-8;
      ASSERT_LE(std::fabs(to_float(in_fp32[i]) - exact[i]), bound + magnitude[i] * 0x1p-18) << i;
      ASSERT_LE(std::fabs(to_float(in_pair[i]) - exact[i]), bound + magnitude[i] * 0x1p-11) << i;
      plain_off += std::fabs(plain[i] - exact[i]), fp32_off += std::fabs(to_float(in_fp32[i]) - exact[i]);
      pair_off += std::fabs(to_float(in_pair[i]) - exact[i]);
    }
    EXPECT_LT(pair_off, 1.1 * fp32_off) << "what is left is the last rounding, of both";
    EXPECT_GT(plain_off, 4 * fp32_off);
  }
}

}  // namespace
