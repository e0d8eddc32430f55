// The AdamW kernel, run on the CPU, against the CPU pass: equal bits of weights and states for every strategy, since
// each element is one sequence of correctly rounded operations; quality sums equal but for the order of additions.
#include "dev/tests/optimizing.h"
#include "dev/tests/simt/kernel_runs.h"
#include "kernels/global_norm.cuh"
#include "kernels/gradient_sum.cuh"
#include "mcf/adamw.cuh"
#include "mcf/adamw_kernel.cuh"

namespace {

using simt::Buffer;

template <class T>
std::vector<uint8_t> bytes_of(const std::vector<T>& x) {
  const auto* p = reinterpret_cast<const uint8_t*>(x.data());
  return {p, p + x.size() * sizeof(T)};
}
void append(std::vector<uint8_t>& to, const std::vector<uint8_t>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

// Tensors with every tail of a 16-byte access; between them lies what nobody may touch.
struct Tensors {
  std::vector<Block> blocks;
  size_t n = 0;
  Tensors() {
    bool decay = true;
    for (const size_t size : {block_elements + 1, size_t{1}, size_t{2}, size_t{3}, size_t{8}, size_t{77}, size_t{12},
                              size_t{2053}, size_t{2054}, size_t{2055}}) {
      append_blocks(blocks, n, size, decay);
      n += (size + tensor_alignment - 1) / tensor_alignment * tensor_alignment;
      decay = !decay;
    }
  }
};

// Three steps from random weights; gradients over many magnitudes, some 0.
struct Steps {
  static constexpr int count = 3;
  std::vector<AdamWStep> steps;
  template <class floatX>
  static std::vector<floatX> gradient(size_t n, int t) {
    auto g = random_normal<floatX>(n, static_cast<unsigned>(10 + t), 1e-3f);
    for (size_t i = 0; i < n; i++) {
      if (i % 5 == 0) store(g[i], 0.0f);
      if (i % 7 == 0) store(g[i], to_float(g[i]) * 1e-6f);
      if (i % 11 == 0) store(g[i], to_float(g[i]) * 1e5f);
    }
    return g;
  }
  Steps() {
    for (int t = 1; t <= count; t++)
      steps.push_back({adamw_scalars(1e-3, .9, t == 3 ? .999 : .95, 1e-8, .1, 1, t == 2 ? 0.5 : 2.5, t), 0});
  }
};

template <class S>
std::vector<uint8_t> on_the_cpu(const Tensors& tensors, const Steps& steps, std::vector<QualitySums>* sums) {
  using floatX = typename S::Theta;
  Device device(1);
  auto theta = random_normal<floatX>(tensors.n, 1, .02f);
  const BlockList blocks(tensors.blocks, device);
  const auto optimizer = make_optimizer<S>(theta.data(), blocks, theta.size(), device);
  for (int t = 0; t < Steps::count; t++) {
    const auto grads = Steps::gradient<floatX>(tensors.n, t);
    const AdamWScalars& k = steps.steps[static_cast<size_t>(t)].scalars;
    sums->push_back(update(*optimizer, theta.data(), grads.data(), k, 1, t == 1 ? 0.5 : 2.5, true, device));
  }
  std::vector<uint8_t> all = bytes_of(theta);
  for (const auto& state : optimizer->states()) {
    const auto* p = static_cast<const uint8_t*>(state.data);
    all.insert(all.end(), p, p + tensors.n * state.element_bytes);
  }
  return all;
}

template <class S, class... T>
std::vector<uint8_t> on_the_gpu(const Tensors& tensors, const Steps& steps, std::vector<QualitySums>* sums,
                                bool with_quality, std::tuple<T...>*) {
  using floatX = typename S::Theta;
  const auto theta0 = random_normal<floatX>(tensors.n, 1, .02f);
  Buffer<floatX> theta(theta0, "theta");
  std::tuple<Buffer<T>...> states(std::vector<T>(tensors.n)...);
  if constexpr (S::second_moment == 2)
    for (size_t i = 0; i < tensors.n; i++) {
      float w = to_float(theta0[i]), beside = 0;
      S::set(w, w, beside);
      store_grid(std::get<0>(states).data()[i], beside);
    }
  Buffer<Block> blocks(tensors.blocks);
  for (int t = 0; t < Steps::count; t++) {
    Buffer<floatX> grads(Steps::gradient<floatX>(tensors.n, t), "grads");
    Buffer<AdamWStep> step(std::vector<AdamWStep>(1, steps.steps[static_cast<size_t>(t)]), "step");
    Buffer<QualitySums> quality(tensors.blocks.size(), "quality");
    std::apply(
        [&](auto&... s) {
          adamw_cuda<S>(theta.data(), grads.data(), blocks.data(), tensors.blocks.size(), step.data(),
                        with_quality ? quality.data() : nullptr, 0, nullptr, s.data()...);
        },
        states);
    QualitySums all;
    if (with_quality)
      for (const auto& q : quality.values()) all += q;
    sums->push_back(all);
  }
  std::vector<uint8_t> all = bytes_of(theta.values());
  std::apply([&](auto&... s) { (append(all, bytes_of(s.values())), ...); }, states);
  return all;
}

template <class S>
class AdamWKernel : public testing::Test {};
TYPED_TEST_SUITE(AdamWKernel, StrategyTypes, StrategyNames);

// Double sums of 15,000 terms in two orders: 1e-12 of the sum of magnitudes, which Cauchy and Schwarz bound for ue.
void expect_same(const QualitySums& got, const QualitySums& want, const std::string& where) {
  EXPECT_NEAR(got.uu, want.uu, 1e-12 * want.uu) << where;
  EXPECT_NEAR(got.ee, want.ee, 1e-12 * want.ee) << where;
  EXPECT_NEAR(got.ee_hi, want.ee_hi, 1e-12 * want.ee_hi) << where;
  EXPECT_NEAR(got.ue, want.ue, 1e-12 * std::sqrt(want.uu * want.ee)) << where;
  EXPECT_NEAR(got.ue_hi, want.ue_hi, 1e-12 * std::sqrt(want.uu * want.ee_hi)) << where;
  EXPECT_NEAR(got.decay, want.decay, 1e-12 * want.decay) << where;
  EXPECT_NEAR(got.lost_decay, want.lost_decay, 1e-12 * want.decay) << where;
  EXPECT_EQ(got.intended, want.intended) << where;
  EXPECT_EQ(got.lost, want.lost) << where;
  EXPECT_EQ(got.lost_hi, want.lost_hi) << where;
  EXPECT_EQ(got.fed, want.fed) << where;
  EXPECT_EQ(got.stale_v, want.stale_v) << where;
}

TYPED_TEST(AdamWKernel, GivesTheBitsOfTheCpu) {
  using S = TypeParam;
  constexpr typename S::States* states = nullptr;
  const Tensors tensors;
  const Steps steps;
  std::vector<QualitySums> expected_sums, first_sums;
  const auto expected = on_the_cpu<S>(tensors, steps, &expected_sums);
  for (const auto& order : simt::orders()) {
    simt::options() = order;
    std::vector<QualitySums> sums, none;
    EXPECT_TRUE(on_the_gpu<S>(tensors, steps, &sums, true, states) == expected) << simt::describe(order);
    EXPECT_TRUE(on_the_gpu<S>(tensors, steps, &none, false, states) == expected) << simt::describe(order);
    for (size_t t = 0; t < sums.size(); t++)
      expect_same(sums[t], expected_sums[t], simt::describe(order) + ", step " + std::to_string(t + 1));
    if (first_sums.empty()) first_sums = sums;
    EXPECT_EQ(memcmp(sums.data(), first_sums.data(), sums.size() * sizeof sums[0]), 0) << simt::describe(order);
  }
  simt::options() = {};
}

TYPED_TEST(AdamWKernel, SkipsWithoutATrace) {
  using S = TypeParam;
  constexpr typename S::States* states = nullptr;
  const Tensors tensors;
  Steps steps;
  for (AdamWStep& step : steps.steps) step.skip = 1;
  std::vector<QualitySums> sums;
  const auto got = on_the_gpu<S>(tensors, steps, &sums, true, states);
  const auto theta = bytes_of(random_normal<typename S::Theta>(tensors.n, 1, .02f));
  EXPECT_TRUE(std::equal(theta.begin(), theta.end(), got.begin()));
  for (const auto& s : sums) EXPECT_TRUE(s.uu == 0 && s.fed == 0 && s.intended == 0);
}

// The clip of adamw_scalars(), bit for bit, and skip where the norm is not finite.
TEST(ClipAndSkip, EqualsTheHost) {
  std::mt19937_64 generator(1);
  for (int i = 0; i < 2000; i++) {
    const double grad_clip = i % 4 ? std::ldexp(1 + 1e-19 * static_cast<double>(generator() >> 1), i % 13 - 6) : 0;
    double norm = std::ldexp(1 + 1e-19 * static_cast<double>(generator() >> 1), i % 17 - 8);
    if (i % 19 == 0) norm = grad_clip;
    if (i % 23 == 0) norm = INFINITY;
    if (i % 29 == 0) norm = NAN;
    if (i % 31 == 0) norm = 0;
    const AdamWScalars k = adamw_scalars(1e-3, .9, .95, 1e-8, .1, grad_clip, norm, 7);
    AdamWStep before{k, 5};
    before.scalars.clip = -1;
    Buffer<AdamWStep> step(std::vector<AdamWStep>(1, before));
    Buffer<double> norm_d(std::vector<double>(1, norm));
    clip_and_skip_cuda(step.data(), norm_d.data(), grad_clip, nullptr);
    const AdamWStep after = step.values()[0];
    ASSERT_EQ(memcmp(&after.scalars, &k, sizeof k), 0) << grad_clip << " " << norm;
    ASSERT_EQ(after.skip, std::isfinite(norm) ? 0 : 1) << norm;
  }
}

// Single elements and sums of micro-batches: the bits of the CPU, at sizes with every tail of a thread block.
TEST(Gather, EqualsTheCpu) {
  for (const size_t n : {size_t{1}, size_t{255}, size_t{256}, size_t{700}}) {
    const auto from = random_normal<float>(5000, 1, 1);
    std::vector<size_t> at(n);
    for (size_t i = 0; i < n; i++) at[i] = 100 + i * 7919 % 5000;
    std::vector<float> expected(n);
    gather_cpu(expected.data(), from.data(), 100, at.data(), n);
    Buffer<float> out(std::vector<float>(n), "out"), in(from, "from");
    Buffer<size_t> places(at, "at");
    launch(gather_kernel<float>, blocks_for(n, 256), 256, 0, nullptr, out.data(), in.data(), size_t{100}, places.data(),
           n);
    EXPECT_EQ(out.values(), expected);
  }
}

TEST(GradientSumKernel, EqualsTheCpu) {
  for (const size_t n : {size_t{1}, size_t{256}, size_t{707}}) {
    std::vector<float> sum(n);
    std::vector<bf16> hi(n), lo(n);
    Buffer<float> sum_gpu(sum, "sum");
    Buffer<bf16> hi_gpu(hi, "hi"), lo_gpu(lo, "lo");
    for (int micro = 0; micro < 5; micro++) {
      const bool last = micro % 3 == 2;
      auto g = random_normal<bf16>(n, static_cast<unsigned>(micro), 1), h = g;
      Buffer<bf16> g_gpu(g, "g"), h_gpu(h, "h");
      add_gradients_cpu(g.data(), n, last, sum.data());
      add_gradients_cpu(h.data(), n, last, hi.data(), lo.data());
      launch((add_gradients_kernel<float>), blocks_for(n, 256), 256, 0, nullptr, g_gpu.data(), n, last, sum_gpu.data());
      launch((add_gradients_kernel<bf16, bf16>), blocks_for(n, 256), 256, 0, nullptr, h_gpu.data(), n, last,
             hi_gpu.data(), lo_gpu.data());
      EXPECT_EQ(bytes_of(g_gpu.values()), bytes_of(g));
      EXPECT_EQ(bytes_of(h_gpu.values()), bytes_of(h));
      EXPECT_EQ(bytes_of(sum_gpu.values()), bytes_of(sum));
      EXPECT_EQ(bytes_of(hi_gpu.values()), bytes_of(hi));
      EXPECT_EQ(bytes_of(lo_gpu.values()), bytes_of(lo));
    }
  }
}

}  // namespace
