// adamw.cuh: 200 steps of every strategy through the production pass, equal bit for bit to the NumPy oracle
// (dev/tests/oracle/adamw.py), and its quality sums; equal bits for every number of threads.
//
// Bits are demanded because a strategy is a fixed sequence of correctly rounded operations: there is one right answer.
#include "mcf/adamw.cuh"

#include <gtest/gtest.h>

#include "dev/tests/golden.h"
#include "dev/tests/numbers.h"
#include "dev/tests/optimizing.h"
#include "runtime/crc32.h"

namespace {

const std::vector<std::string> cases = {"clip", "beta2_999", "low_lr", "through_zero", "extremes"};

// Two tensors in one flat buffer, the first decayed; a gap after each, which must stay as it is.
struct Layout {
  size_t n[2], begin[2], size;
  std::vector<Block> blocks;
  explicit Layout(const Golden& golden) {
    const std::vector<int> tensors = golden.i32("tensors");
    size = 0;
    for (int i = 0; i < 2; i++) {
      n[i] = static_cast<size_t>(tensors[static_cast<size_t>(i)]);
      begin[i] = size;
      append_blocks(blocks, begin[i], n[i], i == 0);
      size += (n[i] + tensor_alignment - 1) / tensor_alignment * tensor_alignment;
    }
  }
  // Bytes of the real elements of a flat array.
  std::string bytes(const void* data, size_t element) const {
    std::string out;
    for (int i = 0; i < 2; i++) out.append(static_cast<const char*>(data) + begin[i] * element, n[i] * element);
    return out;
  }
  template <class T>
  void scatter(std::vector<T>& to, const float* from) const {
    for (int i = 0; i < 2; i++)
      for (size_t j = 0; j < n[i]; j++) store(to[begin[i] + j], *from++);
  }
};

template <class T>
std::string golden_bytes(const Golden& golden, const std::string& tensor) {
  const std::vector<T> x = golden.get<T>(tensor);
  return {reinterpret_cast<const char*>(x.data()), x.size() * sizeof(T)};
}
std::string golden_bytes(const Golden& golden, const std::string& tensor) {
  const std::string dtype = golden.dtype(tensor);
  return dtype == "BF16"  ? golden_bytes<bf16>(golden, tensor)
         : dtype == "I16" ? golden_bytes<int16_t>(golden, tensor)
         : dtype == "I8"  ? golden_bytes<int8_t>(golden, tensor)
                          : golden_bytes<float>(golden, tensor);
}

// Double sums of n <= 96 terms in some order: each term and each partial sum is rounded to 2^-53, so off by at most
// n * 2^-53 = 1e-14 of the sum of magnitudes. uu and ee are such sums themselves, and bound ue's by Cauchy and Schwarz.
void expect_quality(const QualitySums& sums, const double* expected, const std::string& where) {
  const double uu = expected[0], ee = expected[2], ee_hi = expected[4], tolerance = 2e-14;
  EXPECT_NEAR(sums.uu, uu, tolerance * uu) << where;
  EXPECT_NEAR(sums.ue, expected[1], tolerance * std::sqrt(uu * ee)) << where;
  EXPECT_NEAR(sums.ee, ee, tolerance * ee) << where;
  EXPECT_NEAR(sums.ue_hi, expected[3], tolerance * std::sqrt(uu * ee_hi)) << where;
  EXPECT_NEAR(sums.ee_hi, ee_hi, tolerance * ee_hi) << where;
  EXPECT_NEAR(sums.decay, expected[5], tolerance * expected[5]) << where;
  EXPECT_NEAR(sums.lost_decay, expected[6], tolerance * expected[5]) << where;
  const std::vector<int64_t> counts = {sums.intended, sums.lost, sums.lost_hi, sums.fed, sums.stale_v};
  for (size_t i = 0; i < counts.size(); i++)
    EXPECT_EQ(static_cast<double>(counts[i]), expected[7 + i]) << where << ", count " << i;
}

template <class S>
void expect_trajectory(const std::string& name, bool with_quality) {
  using floatX = typename S::Theta;
  const Golden golden("adamw_" + name);
  const std::string strategy = label<S>();
  ASSERT_TRUE(golden.has(strategy + "/crc")) << strategy << ": add it to dev/tests/oracle/adamw.py and regenerate";
  const Layout layout(golden);
  const auto hyper = golden.get<double>("hyper"), lr = golden.get<double>("lr"), norm = golden.get<double>("norm");
  const auto g = golden.f32("g"), theta0 = golden.f32("theta0");
  const auto crcs = golden.get<uint32_t>(strategy + "/crc");
  const auto quality = golden.get<double>(strategy + "/quality");
  const size_t elements = theta0.size(), every = static_cast<size_t>(golden.i32("quality_every")[0]);

  Device device(1);
  std::vector<floatX> theta(layout.size), grads(layout.size);
  layout.scatter(theta, theta0.data());
  const BlockList blocks(layout.blocks, device);
  const auto optimizer = make_optimizer<S>(theta.data(), blocks, theta.size(), device);
  ASSERT_TRUE(optimizer);
  for (size_t step = 1; step <= lr.size(); step++) {
    layout.scatter(grads, &g[(step - 1) * elements]);
    const AdamWScalars k = adamw_scalars(lr[step - 1], hyper[0], hyper[1], hyper[2], hyper[3], hyper[4], norm[step - 1],
                                         static_cast<int64_t>(step), 7);
    const QualitySums sums =
        update(*optimizer, theta.data(), grads.data(), k, hyper[4], norm[step - 1], with_quality, device);
    const std::string where = strategy + ", " + name + ", step " + std::to_string(step);
    if (with_quality && step % every == 0) expect_quality(sums, &quality[(step / every - 1) * 12], where);
    ASSERT_TRUE(with_quality || sums.uu == 0) << where;

    // All bits by CRC; at the steps that the file holds, which state differs.
    const std::string prefix = strategy + "/" + std::to_string(step) + "/";
    const bool held = golden.has(prefix + "theta");
    std::string bytes = layout.bytes(theta.data(), sizeof(floatX));
    ASSERT_TRUE(!held || bytes == golden_bytes(golden, prefix + "theta")) << where << ", theta";
    for (const auto& state : optimizer->states()) {
      const std::string b = layout.bytes(state.data, state.element_bytes);
      ASSERT_TRUE(!held || b == golden_bytes(golden, prefix + state.name)) << where << ", " << state.name;
      bytes += b;
    }
    ASSERT_EQ(crc32(bytes.data(), bytes.size()), crcs[step - 1]) << where;
  }
  for (size_t i = layout.n[0]; i < layout.begin[1]; i++) EXPECT_EQ(to_float(theta[i]), 0) << "between the tensors";
}

template <class S>
class StrategyAdamW : public testing::Test {};
TYPED_TEST_SUITE(StrategyAdamW, StrategyTypes, StrategyNames);

TYPED_TEST(StrategyAdamW, EqualsTheOracleBitForBit) {
  for (const auto& name : cases) expect_trajectory<TypeParam>(name, false);
}
TYPED_TEST(StrategyAdamW, QualitySumsEqualTheOracle) {
  for (const auto& name : cases) expect_trajectory<TypeParam>(name, true);
}

// The per-step scalars against the oracle's: equal bits, since both are one rounding of the same double expression.
TEST(AdamWScalars, EqualTheOracle) {
  for (const auto& name : cases) {
    const Golden golden("adamw_" + name);
    const auto hyper = golden.get<double>("hyper"), lr = golden.get<double>("lr"), norm = golden.get<double>("norm");
    const auto scalars = golden.f32("scalars"), constants = golden.f32("constants");
    for (size_t t = 0; t < lr.size(); t++) {
      const AdamWScalars k =
          adamw_scalars(lr[t], hyper[0], hyper[1], hyper[2], hyper[3], hyper[4], norm[t], static_cast<int64_t>(t) + 1);
      const std::vector<float> per_step = {k.a1, k.r2, k.lw, k.clip};
      for (size_t i = 0; i < 4; i++) ASSERT_EQ(per_step[i], scalars[4 * t + i]) << name << " " << t << " " << i;
      const std::vector<float> fixed = {k.beta1, k.one_minus_beta1, k.beta2,   k.one_minus_beta2,
                                        k.eps,   k.beta2_hi,        k.beta2_lo};
      for (size_t i = 0; i < 7; i++) ASSERT_EQ(fixed[i], constants[i]) << name << " " << i;
    }
  }
}

// Several blocks a tensor, odd sizes: the bits of weights, states and quality sums must not depend on the threads.
template <class S>
std::string run_with_threads(int threads) {
  using floatX = typename S::Theta;
  Device device(threads);
  std::vector<Block> blocks;
  const size_t first = 5 * block_elements + 77, n = first + 51 + 3 * block_elements + 1;
  append_blocks(blocks, 0, first, true);
  append_blocks(blocks, first + 51, n - first - 51, false);
  std::vector<floatX> theta(n), grads(n);
  for (size_t i = 0; i < n; i++) store(theta[i], static_cast<float>(.02 * normal(1, i)));
  const BlockList list(blocks, device);
  const auto optimizer = make_optimizer<S>(theta.data(), list, n, device);
  std::string bytes;
  for (int64_t t = 1; t <= 3; t++) {
    for (size_t i = 0; i < n; i++) store(grads[i], static_cast<float>(1e-3 * normal(1 + static_cast<uint64_t>(t), i)));
    const AdamWScalars k = adamw_scalars(1e-3, .9, .95, 1e-8, .1, 1, 2, t);
    const QualitySums sums = update(*optimizer, theta.data(), grads.data(), k, 1, 2, true, device);
    bytes.append(reinterpret_cast<const char*>(&sums), sizeof(sums));
  }
  bytes.append(reinterpret_cast<const char*>(theta.data()), n * sizeof(floatX));
  for (const auto& state : optimizer->states())
    bytes.append(static_cast<const char*>(state.data), n * state.element_bytes);
  return bytes;
}
TYPED_TEST(StrategyAdamW, ThreadsChangeNoBit) {
  const std::string one = run_with_threads<TypeParam>(1);
  for (const int threads : {2, 3, 4}) EXPECT_TRUE(run_with_threads<TypeParam>(threads) == one) << threads;
}

// Tensors longer than a block, and than any chunk of one: as update() on one element after the other, and the quality
// sums as plain sums. Tolerance as in expect_quality, for n terms.
TYPED_TEST(StrategyAdamW, LongTensorsEqualOneElementAtATime) {
  using S = TypeParam;
  using floatX = typename S::Theta;
  constexpr size_t n_states = std::tuple_size_v<typename S::States>, n = 2 * block_elements + 333;
  Device device(1);
  std::vector<Block> blocks;
  append_blocks(blocks, 0, n, true);
  std::vector<floatX> theta(n), grads(n);
  for (size_t i = 0; i < n; i++) store(theta[i], static_cast<float>(.02 * normal(1, i)));
  const BlockList list(blocks, device);
  const auto optimizer = make_optimizer<S>(theta.data(), list, n, device);
  std::vector<std::array<float, 1 + n_states>> reference(n);  // theta, then the states
  for (size_t i = 0; i < n; i++) {
    reference[i][0] = to_float(theta[i]);
    S::set(reference[i][0], reference[i][0], reference[i][1]);
  }
  for (int64_t t = 1; t <= 3; t++) {
    for (size_t i = 0; i < n; i++) store(grads[i], static_cast<float>(1e-3 * normal(1 + static_cast<uint64_t>(t), i)));
    const AdamWScalars k = adamw_scalars(1e-4, .9, .95, 1e-8, .1, 1, 2, t);
    const QualitySums sums = update(*optimizer, theta.data(), grads.data(), k, 1, 2, true, device);
    double uu = 0, ue = 0, ee = 0;
    int64_t lost = 0;
    for (size_t i = 0; i < n; i++) {
      auto& r = reference[i];
      float u;
      const double before = S::value(r[0], r[1]);
      [&]<size_t... J>(std::index_sequence<J...>) {
        S::update(k, random_bits_of(k, i), to_float(grads[i]), u, r[0], r[1 + J]...);
      }
      (std::make_index_sequence<n_states>());
      const double e = S::value(r[0], r[1]) - before, ud = u;
      uu += ud * ud, ue += ud * e, ee += e * e, lost += u != 0 && e == 0;
      ASSERT_TRUE(same_bits(to_float(theta[i]), r[0])) << i;
      for (size_t j = 0; j < n_states; j++) {
        const auto& state = optimizer->states()[j];
        const auto stored = [&]<size_t... J>(std::index_sequence<J...>) {
          float x = 0;
          ((J == j ? void(x = to_float(static_cast<std::tuple_element_t<J, typename S::States>*>(state.data)[i]))
                   : void()),
           ...);
          return x;
        };
        ASSERT_TRUE(same_bits(stored(std::make_index_sequence<n_states>()), r[1 + j])) << i << ", " << state.name;
      }
    }
    EXPECT_NEAR(sums.uu, uu, n * 0x1p-53 * uu);
    EXPECT_NEAR(sums.ue, ue, n * 0x1p-53 * std::sqrt(uu * ee));
    EXPECT_NEAR(sums.ee, ee, n * 0x1p-53 * ee);
    EXPECT_EQ(sums.lost, lost);
    EXPECT_EQ(sums.fed, static_cast<int64_t>(n));
  }
}

// The states' memory is what the strategy's list says.
TYPED_TEST(StrategyAdamW, StatesAreAccounted) {
  constexpr size_t n = 1000;
  using floatX = typename TypeParam::Theta;
  Device device(1);
  const std::vector<floatX> theta(n);
  const BlockList blocks({}, device);
  const auto optimizer = make_optimizer<TypeParam>(theta.data(), blocks, n, device);
  EXPECT_EQ(device.bytes(Memory::states),
            static_cast<int64_t>(n * (bytes_per_parameter<TypeParam>() - 2 * sizeof(floatX))));
  EXPECT_EQ(device.bytes() - device.bytes(Memory::states), device.bytes(Memory::workspace));
}

}  // namespace
