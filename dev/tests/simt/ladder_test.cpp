// Every version of the ladder for learners (dev/bench/ladder), from the naive one to the production kernel, against the
// CPU twin, in every order of execution.
#include "dev/bench/ladder/adamw.cuh"
#include "dev/bench/ladder/attention.cuh"
#include "dev/bench/ladder/layernorm.cuh"
#include "dev/tests/simt/kernel_runs.h"

namespace {

using simt::Buffer;

template <class X>
class Ladder : public testing::Test {};
struct TypeNames {
  template <class X>
  static std::string GetName(int) { return type_name<X>(); }
};
using ElementTypes = testing::Types<float, bf16>;
TYPED_TEST_SUITE(Ladder, ElementTypes, TypeNames);

TYPED_TEST(Ladder, LayerNorm) {
  using X = TypeParam;
  const int rows = 5;
  for (const int C : {1, 33, 64, 264}) {
    const size_t n = static_cast<size_t>(rows) * C, channels = static_cast<size_t>(C);
    const auto inp = random_normal<X>(n, 1, 1.0f, 0.5f), weight = random_normal<X>(channels, 2);
    const auto bias = random_normal<X>(channels, 3);
    std::vector<X> out(n);
    std::vector<float> mean(rows), rstd(rows);
    layernorm_forward_cpu(out.data(), mean.data(), rstd.data(), inp.data(), weight.data(), bias.data(), rows, 1, C);
    Buffer<X> inp_d(inp), weight_d(weight), bias_d(bias);
    for (const auto& version : ladder::layernorm_versions<X>) {
      const std::string what = strf("%s, C = %d", version.name, C);
      const auto got = in_every_order([&] {
        Buffer<X> out_d(n, "out");
        Buffer<float> mean_d(rows, "mean"), rstd_d(rows, "rstd");
        version.run(out_d.data(), mean_d.data(), rstd_d.data(), inp_d.data(), weight_d.data(), bias_d.data(), rows, C,
                    nullptr);
        return Results().add(out_d).add(mean_d).add(rstd_d);
      }, what);
      // Sums of up to 264 terms of size 1 to 2 in two orders: at most 264 additions, off by 2^-24 of the sum each.
      Comparison comparison(got, what);
      comparison.near(out, "out", 2e-5, 4e-5);
      comparison.near(mean, "mean", 0, 2e-5);
      comparison.near(rstd, "rstd", 2e-5, 0);
    }
  }
}

TYPED_TEST(Ladder, Attention) {
  using X = TypeParam;
  struct Shape { int B, T, NH, d; };
  for (const Shape s : {Shape{1, 1, 1, 32}, Shape{2, 37, 2, 32}, Shape{1, 67, 1, 64}, Shape{1, 20, 3, 12}}) {
    const int C = s.NH * s.d;
    const size_t n = static_cast<size_t>(s.B) * s.T * C, stats = static_cast<size_t>(s.B) * s.T * s.NH;
    const auto qkv = random_normal<X>(3 * n, 1);
    std::vector<X> out(n);
    std::vector<float> lse(stats);
    Device device(1);
    attention_forward_cpu(out.data(), lse.data(), qkv.data(), s.B, s.T, C, s.NH, device);
    Buffer<X> qkv_d(qkv, "qkv");
    for (const auto& version : ladder::attention_versions<X>) {
      const std::string what = strf("%s, B = %d, T = %d, NH = %d, d = %d", version.name, s.B, s.T, s.NH, s.d);
      const auto got = in_every_order([&] {
        Buffer<X> out_d(n, "out");
        Buffer<float> lse_d(stats, "lse"), scores(stats * static_cast<size_t>(s.T), "scores");
        version.run({out_d.data(), lse_d.data(), qkv_d.data(), scores.data(), s.B, s.T, C, s.NH}, nullptr);
        return Results().add(out_d).add(lse_d);
      }, what);
      // Scores of size up to 5 in two orders of additions: 1e-6, and as much relatively in P. On tensor cores P is
      // rounded to bf16: its errors of 2^-9 average over the values, of size up to 4.
      Comparison comparison(got, what);
      const bool bf16_probabilities = std::is_same_v<X, bf16> && s.d % 16 == 0;
      comparison.near(out, "out", 1e-5, bf16_probabilities ? 0x1p-8 : 2e-5);
      comparison.near(lse, "lse", 0, 2e-5);
    }
  }
}

// Bit for bit: the versions do the same correctly rounded operations.
TEST(Ladder, AdamW) {
  const size_t sizes[] = {block_elements + 1, 77, 8};
  std::vector<Block> blocks;
  size_t n = 0;
  bool decay = true;
  for (const size_t size : sizes) {
    append_blocks(blocks, n, size, decay);
    n += (size + tensor_alignment - 1) / tensor_alignment * tensor_alignment;
    decay = !decay;
  }
  constexpr int steps = 3;
  auto theta0 = random_normal<bf16>(n, 1, .02f);
  const auto gradient = [&](int t) {
    auto g = random_normal<bf16>(n, static_cast<unsigned>(10 + t), 1e-3f);
    for (size_t i = 0; i < n; i += 7) store(g[i], 0.0f);
    return g;
  };
  const auto scalars = [](int t) { return adamw_scalars(1e-3, .9, .999, 1e-8, .1, 1, t == 2 ? 2.5 : .5, t); };

  Results expected;
  {
    Device device(1);
    const BlockList list(blocks, device);
    auto theta = theta0;
    const auto optimizer = std::make_unique<AdamW<CollagePlus>>(theta.data(), list, n, device);
    for (int t = 1; t <= steps; t++) {
      const auto grads = gradient(t);
      const double norm = t == 2 ? 2.5 : .5;
      optimizer->update(theta.data(), grads.data(), scalars(t), 1, &norm, false, device);
    }
    // Only what belongs to tensors: between them the versions that run over the flat buffer may write.
    const auto add = [&](const bf16* x) {
      for (const Block& b : blocks) expected.add(std::vector<bf16>(x + b.begin, x + b.begin + b.n));
    };
    add(theta.data());
    for (const auto& state : optimizer->states()) add(static_cast<const bf16*>(state.data));
  }
  const std::vector<float> want = expected;
  for (const auto& version : ladder::adamw_versions) {
    const auto got = in_every_order([&] {
      Buffer<bf16> theta(theta0, "theta"), g(n, "g"), u(n, "u");
      const std::vector<bf16> zeros(n);
      Buffer<bf16> theta_lo(zeros, "theta.lo"), m(zeros, "m"), v(zeros, "v"), v_lo(zeros, "v.lo");
      Buffer<Block> blocks_d(blocks, "blocks");
      for (int t = 1; t <= steps; t++) {
        Buffer<bf16> grads(gradient(t), "grads");
        Buffer<AdamWStep> step(std::vector<AdamWStep>(1, AdamWStep{scalars(t), 0}), "step");
        version.run({theta.data(), grads.data(), theta_lo.data(), m.data(), v.data(), v_lo.data(), g.data(), u.data(),
                     blocks_d.data(), n, blocks.size(), step.data()}, nullptr);
      }
      Results results;
      for (auto* x : {&theta, &theta_lo, &m, &v, &v_lo})
        for (const Block& b : blocks) results.add(std::vector<bf16>(x->data() + b.begin, x->data() + b.begin + b.n));
      return results;
    }, version.name);
    ASSERT_EQ(got.size(), want.size());
    size_t differ = 0;
    for (size_t i = 0; i < got.size(); i++) differ += float_bits(got[i]) != float_bits(want[i]);
    EXPECT_EQ(differ, 0u) << version.name << ": elements with other bits than the CPU's, of " << got.size();
  }
}

}  // namespace
