// strategies.h: what each strategy is for, measured on synthetic gradients.
//
// Bits are adamw_test.cpp's business. Here are the properties that the strategies are chosen by: how well they track
// the second moment, how far the weights end from those of fp64 AdamW, how much of an update is lost, and a LayerNorm
// weight that cannot move. Sizes are small enough for seconds and large enough that sampling noise stays well inside
// each tolerance; the expected values were measured over larger runs by independent scripts.
#include "mcf/strategies.h"

#include <gtest/gtest.h>

#include <vector>

#include "dev/tests/numbers.h"
#include "dev/tests/optimizing.h"
#include "mcf/adamw.cuh"

namespace {

// A strategy's weights and states over n elements, as floats, updated directly (no blocks, no threads).
template <class S>
class Run {
 public:
  static constexpr size_t n_states = std::tuple_size_v<typename S::States>;

  explicit Run(const std::vector<double>& theta0) : theta_(theta0.size()) {
    for (size_t j = 0; j < n_states; j++) states_[j].resize(theta_.size());
    for (size_t i = 0; i < theta_.size(); i++) {
      float beside = 0;
      S::set(rn(static_cast<float>(theta0[i])), theta_[i], beside);
      if (S::second_moment == 2) states_[0][i] = beside;
    }
  }
  // One step of all elements, as the CPU program does it: values pass through their storage type.
  void update(const std::vector<float>& g, const AdamWScalars& k) {
    for (size_t i = 0; i < theta_.size(); i++) {
      float u;
      [&]<size_t... J>(std::index_sequence<J...>) {
        S::update(k, random_bits_of(k, i), g[i], u, theta_[i], states_[J][i]...);
        (expect_stored<std::tuple_element_t<J, typename S::States>>(states_[J][i]), ...);
      }
      (std::make_index_sequence<n_states>());
      expect_stored<typename S::Theta>(theta_[i]);
    }
  }
  double value(size_t i) const { return S::value(theta_[i], states_[0][i]); }
  float theta(size_t i) const { return theta_[i]; }
  double v(size_t i) const {
    double sum = 0;
    for (size_t j = S::second_moment; j < n_states; j++) sum += states_[j][i];
    return sum;
  }
  int64_t off_grid() const { return off_grid_; }

 private:
  // update() promises values that lie on their type's grid.
  template <class T>
  void expect_stored(float x) {
    if constexpr (std::is_same_v<T, bf16>) off_grid_ += float_bits(rn(x)) != float_bits(x);
    if constexpr (std::is_integral_v<T>) off_grid_ += x != static_cast<float>(static_cast<T>(x));
  }
  std::vector<float> theta_;
  std::array<std::vector<float>, n_states> states_;
  int64_t off_grid_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------------

struct Tracking {
  double mean, rms;
};

// Stored v over the exact moving average of g^2, after steps of stationary gradients N(0, s^2). s spreads over a factor
// 4 from element to element, whole binades of v, since a bf16 v depends on where in its binade it lies.
template <class S>
Tracking track_second_moment(double beta2, int64_t steps, size_t n) {
  Run<S> run(std::vector<double>(n, 0.0));
  std::vector<double> exact(n, 0.0);
  std::vector<float> g(n);
  for (int64_t t = 1; t <= steps; t++) {
    for (size_t i = 0; i < n; i++) {
      const double s = 1e-3 * std::pow(4.0, static_cast<double>(i) / static_cast<double>(n));
      g[i] = rn(static_cast<float>(s * normal(static_cast<uint64_t>(t), i)));
      exact[i] = beta2 * exact[i] + (1 - beta2) * static_cast<double>(g[i]) * g[i];
    }
    run.update(g, adamw_scalars(0, .9, beta2, 1e-8, 0, 0, 0, t));
  }
  EXPECT_EQ(run.off_grid(), 0);
  double sum = 0, squares = 0;
  for (size_t i = 0; i < n; i++) {
    const double ratio = run.v(i) / exact[i];
    sum += ratio, squares += (ratio - 1) * (ratio - 1);
  }
  return {sum / static_cast<double>(n), std::sqrt(squares / static_cast<double>(n))};
}

int64_t settled(double beta2) { return std::lround(6 / (1 - beta2)); }

// Collage-plus, the pair. Tolerance: what the mean varies by with s (.999: 1.0005 to 1.0014), and the noise of the
// mean, rms / sqrt(256), below 1e-4.
TEST(SecondMoment, CollagePlusTracksEveryBeta2) {
  struct Row {
    double beta2, mean, mean_tolerance, rms;
  };
  for (const Row& row : {Row{.95, 1.0002, 4e-4, 5e-4}, Row{.98, .9997, 4e-4, 4e-4}, Row{.99, .9996, 4e-4, 5e-4},
                         Row{.999, 1.0009, 8e-4, 1.2e-3}}) {
    const Tracking plus = track_second_moment<CollagePlus>(row.beta2, settled(row.beta2), 256);
    EXPECT_NEAR(plus.mean, row.mean, row.mean_tolerance) << row.beta2;
    EXPECT_LT(plus.rms, 2 * row.rms) << row.beta2;  // twice: a bound on drift, not a statistic
    EXPECT_GT(plus.rms, row.rms / 4) << row.beta2;  // an fp32 second moment would be far better than a pair of bf16
  }
}

// bf16 second moments: right at .95, off by up to 13 % at .99, and at .999 unable to shrink, since beta2 * v rounds to
// v: 2.2 times too large after 6/(1-beta2) steps, 3.1 times after 18/(1-beta2).
TEST(SecondMoment, Bf16FailsAsBeta2Grows) {
  const Tracking at_95 = track_second_moment<Bf16>(.95, settled(.95), 256);
  EXPECT_NEAR(at_95.mean, 1.000, 2e-3);  // noise of the mean: .007 / sqrt(256) = 4e-4
  EXPECT_NEAR(at_95.rms, .007, .003);
  const Tracking at_99 = track_second_moment<Bf16>(.99, settled(.99), 256);
  EXPECT_GT(at_99.rms, .03);  // .90 to 1.13, depending on s
  EXPECT_LT(at_99.rms, .15);
  const Tracking at_999 = track_second_moment<CollageLight>(.999, settled(.999), 128);
  EXPECT_NEAR(at_999.mean, 2.2, .25);  // "2.2" is a mean over s itself; the spread over s is some 10 %
  EXPECT_NEAR(track_second_moment<CollageLight>(.999, 3 * settled(.999), 64).mean, 3.1, .35);
}

// Rounded once a step: closer at .98 and .99, and stuck as well at .999 (1.7 times too large). At random: right in the
// mean at every beta2, with noise. A pair rounded once: 20 to 60 times closer than the strict pair. Tolerances as
// above.
TEST(SecondMoment, RoundedOnceAtRandomOrAsAPair) {
  EXPECT_LT(track_second_moment<Bf16Rem16>(.95, settled(.95), 256).rms, .0065);  // .005; .007 strict
  EXPECT_NEAR(track_second_moment<Bf16Int8>(.999, settled(.999), 128).mean, 1.7, .2);
  EXPECT_NEAR(track_second_moment<PairFused<CollageLight>>(.999, settled(.999), 128).mean, 1.7, .2);
  for (const auto& [beta2, rms] : {std::pair{.95, .008}, {.99, .017}, {.999, .042}}) {
    const Tracking random = track_second_moment<Bf16Sr>(beta2, settled(beta2), 256);
    EXPECT_NEAR(random.mean, 1, 4 * rms / 16) << beta2;  // four standard errors of the mean of 256
    EXPECT_NEAR(random.rms, rms, rms / 3) << beta2;
  }
  EXPECT_LT(track_second_moment<CollagePlusFused>(.95, settled(.95), 256).rms, 2e-5);
  EXPECT_LT(track_second_moment<CollagePlusFused>(.999, settled(.999), 256).rms, 1.5e-4);
}

// The error of the paper's released product: half of what it should be at .999, a third at .95.
TEST(SecondMoment, AsReleasedIsTooSmall) {
  EXPECT_NEAR(track_second_moment<CollagePlusAsReleased>(.999, settled(.999), 64).mean, .50, .02);
  EXPECT_NEAR(track_second_moment<CollagePlusAsReleased>(.95, settled(.95), 256).mean, .325, .03);
}

TEST(SecondMoment, Fp32IsExact) {
  const Tracking fp32 = track_second_moment<Fp32Master>(.999, settled(.999), 64);
  EXPECT_NEAR(fp32.mean, 1, 2e-5);  // .999 in fp32 is off by 1.3e-8, which is 1.3e-5 of 1 - beta2
  EXPECT_LT(fp32.rms, 2e-5);
}

// ---------------------------------------------------------------------------------------------------------------------

// Synthetic gradients: s (mu + N) with a scale s, log-uniform over 1e-6 to 1e-3, and a drift mu fixed per element.
struct Elements {
  std::vector<double> theta0, scale, drift;
  Elements(size_t n, double drift_size) : theta0(n), scale(n), drift(n) {
    for (size_t i = 0; i < n; i++) {
      theta0[i] = rn(static_cast<float>(.02 * normal(1, i)));
      scale[i] = std::pow(10.0, -6 + 3 * random_uniform(2, i));
      drift[i] = drift_size * normal(3, i);
    }
  }
  void gradient(int64_t t, std::vector<float>& g) const {
    for (size_t i = 0; i < g.size(); i++)
      g[i] = rn(static_cast<float>(scale[i] * (drift[i] + normal(static_cast<uint64_t>(1000 + t), i))));
  }
};

// Warm-up over 200 steps to 6e-4, cosine to a tenth of it at 4,000.
constexpr int64_t schedule_steps = 4000;
double scheduled_lr(int64_t t) {
  if (t <= 200) return 6e-4 * static_cast<double>(t) / 200;
  return 6e-5 + 5.4e-4 * .5 * (1 + std::cos(M_PI * static_cast<double>(t - 200) / (schedule_steps - 200)));
}

// AdamW in double.
void reference_update(std::vector<double>& theta, std::vector<double>& m, std::vector<double>& v,
                      const std::vector<float>& g, double lr, double beta2, int64_t t) {
  const double a1 = lr / (1 - std::pow(.9, static_cast<double>(t)));
  const double r2 = 1 / std::sqrt(1 - std::pow(beta2, static_cast<double>(t)));
  for (size_t i = 0; i < theta.size(); i++) {
    m[i] = .9 * m[i] + .1 * g[i];
    v[i] = beta2 * v[i] + (1 - beta2) * g[i] * g[i];
    theta[i] -= a1 * m[i] / (std::sqrt(v[i]) * r2 + 1e-8) + lr * .1 * theta[i];
  }
}

using Tracked = std::tuple<Bf16, Bf16Sr, Bf16Kahan, CollageLight, PairFused<CollageLight>, Bf16Rem16, Bf16Int8,
                           CollagePlus, CollagePlusFused, Fp32Optim, Fp32Master>;

// How far from fp64 AdamW each strategy ends, in units of how far the weights went.
std::vector<double> distances(double beta2) {
  constexpr size_t n = 1024;
  const Elements elements(n, .15);
  std::vector<double> reference = elements.theta0, m(n), v(n);
  std::vector<float> g(n);
  auto runs = [&]<class... S>(std::tuple<S...>*) {
    return std::tuple(Run<S>(elements.theta0)...);
  }(static_cast<Tracked*>(nullptr));
  for (int64_t t = 1; t <= schedule_steps; t++) {
    const double lr = scheduled_lr(t);
    elements.gradient(t, g);
    reference_update(reference, m, v, g, lr, beta2, t);
    const AdamWScalars k = adamw_scalars(lr, .9, beta2, 1e-8, .1, 0, 0, t);
    std::apply([&](auto&... run) { (run.update(g, k), ...); }, runs);
  }
  double travelled = 0;
  for (size_t i = 0; i < n; i++) travelled += std::pow(reference[i] - elements.theta0[i], 2);
  const auto distance = [&](const auto& run) {
    EXPECT_EQ(run.off_grid(), 0);
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += std::pow(run.value(i) - reference[i], 2);
    return std::sqrt(sum / travelled);
  };
  return std::apply([&](auto&... run) { return std::vector{distance(run)...}; }, runs);
}

// Expected: the same runs with more elements. Over 1,024 elements (scales over three decades) they vary by some 10 %; a
// third is allowed, where the strategies differ by factors of 30 and more.
TEST(Trajectory, DistanceFromFp64AdamW) {
  const std::vector<std::pair<double, std::vector<double>>> rows = {
      {.95, {5.9e-1, 5.5e-2, 1.5e-3, 1.5e-3, 7.1e-4, 7.0e-4, 7.6e-4, 1.3e-3, 5.8e-4, 5.9e-1, 1.2e-6}},
      {.99, {5.8e-1, 5.5e-2, 4.3e-2, 4.3e-2, 1.1e-2, 1.1e-2, 1.1e-2, 1.5e-3, 5.8e-4, 5.8e-1, 1.3e-6}},
      {.999, {6.3e-1, 5.5e-2, 1.4e-1, 1.4e-1, 5.6e-2, 5.6e-2, 5.6e-2, 1.4e-3, 5.8e-4, 5.8e-1, 3.6e-6}}};
  for (const auto& [beta2, expected] : rows) {
    const std::vector<double> distance = distances(beta2);
    for (size_t j = 0; j < expected.size(); j++) {
      EXPECT_LT(distance[j], expected[j] * 4 / 3) << "strategy " << j << ", beta2 " << beta2;
      EXPECT_GT(distance[j], expected[j] * 2 / 3) << "strategy " << j << ", beta2 " << beta2;
    }
  }
}

// A strategy run by the production pass at a constant lr, beta2 .95, and the means of its quality over the last steps.
template <class S>
class QualityRun {
 public:
  double edq = 0, edq_hi = 0, lost = 0;

  QualityRun(const Elements& elements, double lr, Device& device)
      : lr_(lr),
        theta_(stored(elements.theta0)),
        grad_(theta_.size()),
        blocks_(one_tensor(theta_.size()), device),
        adamw_(theta_.data(), blocks_, theta_.size(), device) {}
  void update(const std::vector<float>& g, int64_t t, int64_t averaged, bool with_quality, Device& device) {
    for (size_t i = 0; i < g.size(); i++) store(grad_[i], g[i]);
    const AdamWScalars k = adamw_scalars(lr_, .9, .95, 1e-8, .1, 0, 0, t);
    const QualitySums sums = ::update<Theta>(adamw_, theta_.data(), grad_.data(), k, 0, 0, with_quality, device);
    if (!with_quality) return;
    edq += sums.edq() / static_cast<double>(averaged);
    edq_hi += sums.edq_hi() / static_cast<double>(averaged);
    lost += sums.lost_frac() / static_cast<double>(averaged);
  }

 private:
  using Theta = typename S::Theta;
  static std::vector<Block> one_tensor(size_t n) {
    std::vector<Block> blocks;
    append_blocks(blocks, 0, n, true);
    return blocks;
  }
  static std::vector<Theta> stored(const std::vector<double>& theta0) {
    std::vector<Theta> theta(theta0.size());
    for (size_t i = 0; i < theta.size(); i++) store(theta[i], static_cast<float>(theta0[i]));
    return theta;
  }
  double lr_;
  std::vector<Theta> theta_, grad_;
  BlockList blocks_;
  AdamW<S> adamw_;
};

// The tolerances cover what 1,024 elements and 200 steps scatter: about .02 in the edq of bf16, where few elements move
// at all, and a few percent of the lost share.
TEST(Quality, LostUpdatesByLearningRate) {
  constexpr size_t n = 1024;
  constexpr int64_t steps = 3000, averaged = 200;
  struct Row {
    double lr, bf16_edq, bf16_lost, pair_edq, pair_lost;
  };
  const Elements elements(n, .1);
  Device device(1);
  for (const Row& row : {Row{6e-4, .52, .78, 1, .002}, Row{6e-5, .24, .91, 1, .004}, Row{1e-6, .004, .998, .998, .17},
                         Row{1e-7, 0, 1, .63, .67}}) {
    QualityRun<Bf16> bf16(elements, row.lr, device);
    QualityRun<CollageLight> light(elements, row.lr, device);
    QualityRun<CollagePlus> plus(elements, row.lr, device);
    QualityRun<Fp32Master> master(elements, row.lr, device);
    std::vector<float> g(n);
    for (int64_t t = 1; t <= steps; t++) {
      elements.gradient(t, g);
      const auto update = [&](auto&... run) { (run.update(g, t, averaged, t > steps - averaged, device), ...); };
      update(bf16, light, plus, master);
    }
    EXPECT_NEAR(bf16.edq, row.bf16_edq, .04) << row.lr;
    EXPECT_EQ(bf16.edq, bf16.edq_hi) << row.lr;  // there is nothing but the high part
    EXPECT_NEAR(bf16.lost, row.bf16_lost, .03) << row.lr;
    for (const auto& [edq, lost] : {std::pair{light.edq, light.lost}, std::pair{plus.edq, plus.lost}}) {
      EXPECT_NEAR(edq, row.pair_edq, .002 + .05 * row.pair_lost) << row.lr;
      EXPECT_NEAR(lost, row.pair_lost, .002 + .1 * row.pair_lost) << row.lr;
    }
    EXPECT_NEAR(master.edq, 1, .002) << row.lr;
    EXPECT_LT(master.lost, row.lr < 1e-6 ? .03 : .004) << row.lr;  // 2 % at 1e-7, .2 % at 1e-6
  }
}

// ---------------------------------------------------------------------------------------------------------------------

// A LayerNorm weight: 1.0 at the start, not decayed, lr 1e-4. Half an ulp of bf16 is 2^-9 below 1 and 2^-8 above, so
// plain bf16 cannot move it by any update of AdamW's usual size, lr.
template <class S>
void layernorm_weights(int64_t steps, size_t& moved, size_t& moved_hi, double& mean_distance) {
  constexpr size_t n = 256;
  Run<S> run(std::vector<double>(n, 1.0));
  std::vector<float> g(n);
  for (int64_t t = 1; t <= steps; t++) {
    for (size_t i = 0; i < n; i++)  // half of the elements are pushed up, half down
      g[i] = rn(static_cast<float>(1e-3 * (normal(static_cast<uint64_t>(t), i) + (i % 2 ? 1 : -1))));
    run.update(g, adamw_scalars(1e-4, .9, .95, 1e-8, 0, 1.0, .5, t));
  }
  moved = moved_hi = 0, mean_distance = 0;
  for (size_t i = 0; i < n; i++) {
    moved += run.value(i) != 1;
    moved_hi += run.theta(i) != 1;
    mean_distance += std::fabs(run.value(i) - 1) / n;
  }
}

TEST(LayerNormWeightAtOne, FrozenInBf16MovingInCollage) {
  size_t moved, moved_hi;
  double bf16_distance, light, plus, master;
  layernorm_weights<Bf16>(200, moved, moved_hi, bf16_distance);
  EXPECT_EQ(moved, 0u) << "every update is below half an ulp";
  layernorm_weights<Fp32Master>(200, moved, moved_hi, master);
  EXPECT_GT(master, .005);
  layernorm_weights<CollageLight>(200, moved, moved_hi, light);
  EXPECT_EQ(moved, 256u);
  EXPECT_EQ(moved_hi, 256u) << "what the model sees has moved too";
  EXPECT_NEAR(light, master, 1e-2 * master);  // rounding v and m to bf16 once a step: under 1 % after 200 steps
  layernorm_weights<CollagePlus>(200, moved, moved_hi, plus);
  EXPECT_EQ(moved, 256u);
  EXPECT_EQ(moved_hi, 256u);
  EXPECT_NEAR(plus, master, 1e-2 * master);
  layernorm_weights<CollagePlus>(1, moved, moved_hi, plus);
  EXPECT_EQ(moved, 256u) << "from the first step on";
}

// ---------------------------------------------------------------------------------------------------------------------
// How the weight is stored.

// rem16 is an fp32 weight: the same bits as a run that keeps it in fp32, with the same moments.
TEST(Rem16, IsExactlyAnFp32Weight) {
  constexpr size_t n = 512;
  const Elements elements(n, .15);
  ::Run<Bf16Rem16> run(elements.theta0);
  std::vector<float> weight(elements.theta0.begin(), elements.theta0.end()), m(n), v(n), g(n);
  for (int64_t t = 1; t <= 1000; t++) {
    elements.gradient(t, g);
    const AdamWScalars k = adamw_scalars(1e-3, .9, .99, 1e-8, .1, 1, 1.5, t);
    run.update(g, k);
    for (size_t i = 0; i < n; i++) {
      float u;
      register_update(k, g[i], u, weight[i], m[i], v[i]);
      m[i] = rn(m[i]), v[i] = rn(v[i]);
      ASSERT_EQ(run.value(i), weight[i]) << i << ", step " << t;
    }
  }
}

// Every fp32 number comes back, whatever its bits: all exponents with significands that carry, tie and overflow.
TEST(Rem16, HoldsEveryFloat) {
  for (uint32_t upper = 0; upper < 65536; upper++)
    for (const uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const float w = from_bits(upper << 16 | lower);
      if (std::isnan(w)) continue;
      float theta, rem;
      Rem16Weight::store(w, theta, rem);
      ASSERT_TRUE(same_bits(Rem16Weight::load(theta, rem), w)) << upper << " " << lower;
      ASSERT_EQ(float_bits(theta) & 0xffffu, 0u);
      ASSERT_EQ(rem, static_cast<float>(static_cast<int16_t>(rem)));
    }
  float theta, rem;
  Rem16Weight::store(from_bits(0x7fffffff), theta, rem);  // a GPU's NaN
  EXPECT_TRUE(std::isnan(theta) && std::isnan(Rem16Weight::load(theta, rem)));
}

// A weight in int8 is off by half of a 127th of half an ulp at most, and by one rounding of the sum to fp32. Near the
// subnormals the count itself is exact to half, and the floor is the smallest subnormal.
TEST(Int8, IsOffByHalfAStep) {
  for (uint64_t i = 0; i < 200000; i++) {
    const float w = from_bits(static_cast<uint32_t>(random_bits(5, i)));
    if (!(std::fabs(w) < 0x1.fep127f)) continue;
    float theta, rho;
    Int8Weight::store(w, theta, rho);
    const double half_ulp = Int8Weight::half_ulp(theta), off = std::fabs(Int8Weight::load(theta, rho) - double{w});
    ASSERT_TRUE(same_bits(theta, rn(w)));
    ASSERT_LE(std::fabs(rho), 127);
    ASSERT_LE(std::fabs(double{w} - theta), half_ulp);
    ASSERT_LE(off, half_ulp / 254 + std::ldexp(std::fabs(double{w}), -24) + 0x1p-149) << w;
  }
}

// Full values that a pair, a master copy, 16 and 8 bits more can hold, back from double: what a switch of precision
// relies on.
TEST(Weights, SetIsTheInverseOfValue) {
  for (uint64_t i = 0; i < 20000; i++) {
    const auto check = [&]<class W>(double w) {
      float theta, beside = 0;
      W::set(w, theta, beside);
      const double once = W::value(theta, beside);
      W::set(once, theta, beside);
      EXPECT_EQ(W::value(theta, beside), once);
      return once;
    };
    const double hi = rn(static_cast<float>(std::ldexp(normal(3, i), static_cast<int>(i % 60) - 30)));
    const double pair = hi + rn(static_cast<float>(hi * 0x1p-10 * normal(4, i) / 4));
    EXPECT_EQ(check.operator()<PairWeight>(pair), pair);
    const double single = static_cast<float>(pair * (1 + 1e-5 * normal(5, i)));
    EXPECT_EQ(check.operator()<MasterWeight>(single), single);
    EXPECT_EQ(check.operator()<Rem16Weight>(single), single);
    EXPECT_EQ(check.operator()<Fp32Weight>(single), single);
    check.operator()<Int8Weight>(single);
    check.operator()<PlainWeight>(single);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Stochastic rounding.

// The mean of many roundings is the number. Each is one of two neighbours one ulp apart, so the mean of n scatters by
// half an ulp over sqrt(n) at most; four times that is allowed.
TEST(StochasticRounding, IsUnbiased) {
  constexpr int n = 4096;
  for (const float x : {1.001f, -.7183f, 3e-20f, 123456.0f, 1.0f, 0x1.8p-133f})
    for (const int which : {0, 1, 2}) {
      const double ulp = std::ldexp(1.0, std::max(std::ilogb(x), -126) - 7);
      double sum = 0;
      for (uint64_t i = 0; i < n; i++) {
        const AdamWScalars k = adamw_scalars(0, .9, .95, 1e-8, 0, 0, 0, 3, i);
        const float y = Bf16Sr::round(x, random_bits_of(k, 77) >> (16 * which));
        ASSERT_TRUE(same_bits(rn(y), y));
        ASSERT_LT(std::fabs(double{y} - x), ulp);
        sum += double{y} - x;
      }
      EXPECT_LT(std::fabs(sum / n), 4 * ulp / 2 / std::sqrt(n)) << x;
      if (same_bits(rn(x), x)) {
        EXPECT_EQ(sum, 0) << "on the grid, and moved";
      }
    }
  EXPECT_EQ(Bf16Sr::round(INFINITY, 0xffff), INFINITY);
  EXPECT_TRUE(std::isnan(Bf16Sr::round(NAN, 0xffff)));
}

// 16 bits a state, each value as often as the others: chi-squared over 256 classes of the upper byte and of the lower
// lies within five standard deviations (sqrt(2 * 255) = 22.6) of 255. And the states' bits know nothing of each other,
// of the neighbour's, of the next step's: correlations of n products scatter by 1/sqrt(n).
TEST(StochasticRounding, BitsAreUniformAndIndependent) {
  constexpr size_t n = 1 << 18;
  const AdamWScalars now = adamw_scalars(0, .9, .95, 1e-8, 0, 0, 0, 5, 1337);
  const AdamWScalars next = adamw_scalars(0, .9, .95, 1e-8, 0, 0, 0, 6, 1337);
  const auto part = [](uint64_t r, int which) { return static_cast<int>(r >> (16 * which) & 0xffff); };
  for (int which = 0; which < 3; which++) {
    std::array<int, 256> high{}, low{};
    std::array<double, 4> correlation{};
    const auto centred = [&](uint64_t r, int w) { return (part(r, w) - 32767.5) / 18918.0; };
    for (size_t i = 0; i < n; i++) {
      const uint64_t r = random_bits_of(now, i);
      high[static_cast<size_t>(part(r, which) >> 8)]++, low[static_cast<size_t>(part(r, which) & 255)]++;
      correlation[0] += centred(r, which) * centred(r, (which + 1) % 3);
      correlation[1] += centred(r, which) * centred(random_bits_of(now, i + 1), which);
      correlation[2] += centred(r, which) * centred(random_bits_of(now, i + block_elements), which);
      correlation[3] += centred(r, which) * centred(random_bits_of(next, i), which);
    }
    for (const auto& counts : {high, low}) {
      double chi = 0;
      for (const int count : counts) chi += std::pow(count - n / 256.0, 2) / (n / 256.0);
      EXPECT_NEAR(chi, 255, 5 * 22.6) << which;
    }
    for (const double c : correlation) EXPECT_LT(std::fabs(c / n), 5 / std::sqrt(n)) << which;
  }
}

TEST(StochasticRounding, NoTwoElementsOrStepsShareBits) {
  std::vector<uint64_t> all;
  for (int64_t t = 1; t <= 4; t++)
    for (const uint64_t seed : {1u, 2u}) {
      const AdamWScalars k = adamw_scalars(0, .9, .95, 1e-8, 0, 0, 0, t, seed);
      for (size_t i = 0; i < 50000; i++) all.push_back(random_bits_of(k, i));
    }
  std::sort(all.begin(), all.end());
  EXPECT_EQ(std::adjacent_find(all.begin(), all.end()), all.end());
}

// ---------------------------------------------------------------------------------------------------------------------

// Without gradients the norm shrinks by 1 - lr * wd a step. Tolerance: what 1,024 roundings of the weight and of u (8
// bits: up to 2^-9 of u, mostly cancelling) leave of the decay of .6 %; sr adds noise. Plain bf16 weights do not shrink
// at all: lr * wd = 6e-5 lies far below half an ulp.
template <class S>
class WeightDecay : public testing::Test {};
TYPED_TEST_SUITE(WeightDecay, StrategyTypes, StrategyNames);
TYPED_TEST(WeightDecay, ShrinksTheNorm) {
  using S = TypeParam;
  constexpr size_t n = 1024;
  constexpr int64_t steps = 100;
  ::Run<S> run(Elements(n, .1).theta0);
  const auto norm = [&] {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += run.value(i) * run.value(i);
    return std::sqrt(sum);
  };
  const double before = norm(), expected = 1 - std::pow(1 - 6e-5, steps);
  for (int64_t t = 1; t <= steps; t++)
    run.update(std::vector<float>(n), adamw_scalars(6e-4, .9, .95, 1e-8, .1, 0, 0, t, 1));
  const double shrunk = 1 - norm() / before;
  if (S::name == std::string("bf16") || S::name == std::string("fp32_optim"))
    EXPECT_EQ(shrunk, 0);
  else
    EXPECT_NEAR(shrunk, expected, (S::stochastic ? .25 : .02) * expected);
}

}  // namespace
