// kernels/: what a golden file cannot show. Gradients that accumulate, finite differences, thread counts, the norm.
#include <gtest/gtest.h>

#include <functional>

#include "dev/tests/guarded.h"
#include "dev/tests/numbers.h"
#include "dev/tests/optimizing.h"
#include "kernels/attention.cuh"
#include "kernels/encoder.cuh"
#include "kernels/fused_classifier.cuh"
#include "kernels/gelu.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/matmul.cuh"

namespace {

template <class T>
class LayersEdges : public testing::Test {};
struct Names {
  template <class T>
  static std::string GetName(int) {
    return sizeof(T) == 4 ? "fp32" : "bf16";
  }
};
using Types = testing::Types<float, bf16>;
TYPED_TEST_SUITE(LayersEdges, Types, Names);

template <class T>
Guarded<T> randoms(uint64_t seed, size_t n, double scale = 1, double mean = 0) {
  Guarded<T> x(n);
  for (size_t i = 0; i < n; i++) store(x[i], static_cast<float>(mean + scale * normal(seed, i)));
  return x;
}
std::vector<int> tokens_below(int V, size_t n) {
  std::vector<int> tokens(n);
  for (size_t i = 0; i < n; i++) tokens[i] = static_cast<int>(random_bits(3, i) % static_cast<uint64_t>(V));
  return tokens;
}

// Every layer forward and backward once, at sizes that are odd and need several strips, tiles and panels; all results.
template <class T>
std::string every_layer(int threads) {
  Device device(threads);
  std::string bytes;
  {
    const int B = 3, T_ = 35, C = 129, V = 97;
    const size_t BTC = static_cast<size_t>(B * T_ * C);
    const auto tokens = tokens_below(V, BTC / C);
    const auto wte = randoms<T>(1, V * C), wpe = randoms<T>(2, T_ * C), dout = randoms<T>(4, BTC);
    Guarded<T> out(BTC), dwpe(wpe.size(), 0);
    Guarded<float> dwte(wte.size(), 0);
    encoder_forward<T>(out, tokens.data(), wte, wpe, B, T_, C, device);
    encoder_backward<T>(dwte, dwpe, dout, tokens.data(), B, T_, C, V, device);
    auto sum = randoms<T>(5, wte.size());
    add_embedding_gradient<T>(sum, dwte, wte.size(), device);
    bytes += out.bytes() + dwte.bytes() + dwpe.bytes() + sum.bytes();

    const auto weight = randoms<T>(6, C, .2, 1), bias = randoms<T>(7, C, .2), inp2 = randoms<T>(8, BTC);
    Guarded<T> normed(BTC), residual(BTC), dinp(BTC, 0), dweight(C, 0), dbias(C, 0);
    Guarded<float> mean(BTC / C), rstd(BTC / C);
    layernorm_forward<T>(normed, mean, rstd, out, weight, bias, B, T_, C, device);
    bytes += normed.bytes() + mean.bytes() + rstd.bytes();
    residual_layernorm_forward<T>(residual, normed, mean, rstd, out, inp2, weight, bias, B, T_, C, device);
    layernorm_backward<T>(dinp, dweight, dbias, dout, residual, weight, mean, rstd, B, T_, C, device);
    bytes += residual.bytes() + normed.bytes() + dinp.bytes() + dweight.bytes() + dbias.bytes();
  }
  {
    const int B = 3, T_ = 101, C = 70, OC = 300;  // two panels of rows, two of columns
    const size_t rows = static_cast<size_t>(B * T_);
    const auto inp = randoms<T>(1, rows * C), weight = randoms<T>(2, static_cast<size_t>(OC * C), .1);
    const auto bias = randoms<T>(3, OC), dout = randoms<T>(4, rows * OC);
    Guarded<T> out(rows * OC), dinp(rows * C), dweight(weight.size(), 0), dbias(OC, 0);
    matmul_forward<T>(out, inp, weight, bias.data(), B, T_, C, OC, device);
    matmul_backward<T>(dinp, dweight.data(), dbias.data(), dout, inp, weight, B, T_, C, OC, device);
    gelu_forward<T>(out, out, out.size(), device);
    bytes += out.bytes() + dinp.bytes() + dweight.bytes() + dbias.bytes();
  }
  {
    const int B = 3, T_ = 67, C = 39, NH = 3;
    const size_t BTC = static_cast<size_t>(B * T_ * C);
    const auto qkv = randoms<T>(1, 3 * BTC), dout = randoms<T>(2, BTC);
    Guarded<T> out(BTC), dqkv(3 * BTC);
    Guarded<float> lse(static_cast<size_t>(B * NH * T_));
    attention_forward<T>(out, lse, qkv, B, T_, C, NH, device);
    attention_backward<T>(dqkv, dout, out, lse, qkv, B, T_, C, NH, device);
    bytes += out.bytes() + lse.bytes() + dqkv.bytes();
  }
  {
    const int rows = 13, V = 257, Vp = 384;
    auto logits = randoms<T>(1, rows * Vp, 3);
    Guarded<float> losses(rows);
    fused_classifier<T>(losses, logits, tokens_below(V, rows).data(), .1f, rows, V, Vp, true, device);
    bytes += losses.bytes() + logits.bytes();
  }
  const auto grads = randoms<T>(1, 200000);
  std::vector<Block> blocks;
  append_blocks(blocks, 0, 100001, true);
  append_blocks(blocks, 100032, 99968, true);
  for (int i = 0; i < 8; i++) {  // sums in another order differ in half of the cases only, once a root is taken
    const double norm = norm_of<T>(grads, blocks, device);
    bytes.append(reinterpret_cast<const char*>(&norm), sizeof(norm));
    blocks.pop_back();
  }
  return bytes;
}

// Bits: each sum is done by one thread in a fixed order.
TYPED_TEST(LayersEdges, ThreadsChangeNoBit) {
  const std::string one = every_layer<TypeParam>(1);
  for (const int threads : {2, 4}) EXPECT_TRUE(every_layer<TypeParam>(threads) == one) << threads;
}

// Gradients of parameters accumulate over micro-batches: a second backward adds the same sum once more. In both types
// that is exactly twice the first, since a sum and its double round alike; but for dwte, which adds row by row.
TYPED_TEST(LayersEdges, ParameterGradientsAccumulate) {
  using T = TypeParam;
  Device device;
  const int B = 2, T_ = 5, C = 33, OC = 17, V = 97;
  const size_t rows = static_cast<size_t>(B * T_);
  const auto expect_twice = [](const Guarded<T>& twice, const Guarded<T>& once, const char* what) {
    for (size_t i = 0; i < once.size(); i++) ASSERT_EQ(to_float(twice[i]), 2 * to_float(once[i])) << what << " " << i;
  };
  const auto inp = randoms<T>(1, rows * C), dout = randoms<T>(2, rows * C), weight = randoms<T>(3, C, .2, 1);
  Guarded<float> mean(rows, .1f), rstd(rows, 1.2f);
  const auto layernorm = [&](int times, Guarded<T>& dweight, Guarded<T>& dbias) {
    for (int i = 0; i < times; i++) {
      Guarded<T> dinp(inp.size(), 0);
      layernorm_backward<T>(dinp, dweight, dbias, dout, inp, weight, mean, rstd, B, T_, C, device);
    }
  };
  Guarded<T> dw1(C, 0), dw2(C, 0), db1(C, 0), db2(C, 0);
  layernorm(1, dw1, db1), layernorm(2, dw2, db2);
  expect_twice(dw2, dw1, "LayerNorm weight");
  expect_twice(db2, db1, "LayerNorm bias");

  const auto w = randoms<T>(4, static_cast<size_t>(OC * C)), d = randoms<T>(5, rows * OC);
  const auto matmul = [&](int times, Guarded<T>& dinp, Guarded<T>& dweight, Guarded<T>& dbias) {
    for (int i = 0; i < times; i++)
      matmul_backward<T>(dinp, dweight.data(), dbias.data(), d, inp, w, B, T_, C, OC, device);
  };
  Guarded<T> dinp1(inp.size()), dinp2(inp.size()), mw1(w.size(), 0), mw2(w.size(), 0), mb1(OC, 0), mb2(OC, 0);
  matmul(1, dinp1, mw1, mb1), matmul(2, dinp2, mw2, mb2);
  expect_twice(mw2, mw1, "matmul weight");
  expect_twice(mb2, mb1, "matmul bias");
  EXPECT_TRUE(dinp2.bytes() == dinp1.bytes()) << "an input's gradient is written, not added to";

  const auto tokens = tokens_below(V, rows);
  Guarded<T> p1(T_ * C, 0), p2(T_ * C, 0);
  Guarded<float> e1(V * C, 0), e2(V * C, 0);
  encoder_backward<T>(e1, p1, dout, tokens.data(), B, T_, C, V, device);
  for (int i = 0; i < 2; i++) encoder_backward<T>(e2, p2, dout, tokens.data(), B, T_, C, V, device);
  expect_twice(p2, p1, "wpe");
  for (size_t i = 0; i < e1.size(); i++) EXPECT_NEAR(e2[i], 2 * e1[i], 1e-5) << "wte " << i;  // up to 10 terms near 1
}

// Checks gradient[i] = d loss / d x[i] by central differences in fp32. loss is a double sum of some 100 outputs of
// size 1, each rounded to 2^-24: noise 1e-6 / h = 1e-4 at h = 1e-2; the third derivative adds h^2. So 1e-3 is safe, and
// any wrong term of a formula is far beyond.
void expect_slope(Guarded<float>& x, const Guarded<float>& gradient, const std::function<double()>& loss,
                  const char* what) {
  constexpr float h = 1e-2f;
  for (size_t i = 0; i < x.size(); i += 1 + x.size() / 40) {
    const float kept = x[i];
    x[i] = kept + h;
    const double up = loss(), dx = x[i];
    x[i] = kept - h;
    const double slope = (up - loss()) / (dx - x[i]);
    x[i] = kept;
    EXPECT_NEAR(gradient[i], slope, 1e-3 * (1 + std::fabs(slope))) << what << " " << i;
  }
}
double weighted_sum(const Guarded<float>& out, const Guarded<float>& dout) {
  double sum = 0;
  for (size_t i = 0; i < out.size(); i++) sum += static_cast<double>(out[i]) * dout[i];
  return sum;
}

TEST(FiniteDifferences, LayerNorm) {
  Device device(1);
  const int B = 1, T = 4, C = 13;
  auto inp = randoms<float>(1, T * C), weight = randoms<float>(2, C, .2, 1), bias = randoms<float>(3, C);
  const auto dout = randoms<float>(4, T * C);
  Guarded<float> out(T * C), mean(T), rstd(T), dinp(T * C, 0), dweight(C, 0), dbias(C, 0);
  const auto loss = [&] {
    layernorm_forward<float>(out, mean, rstd, inp, weight, bias, B, T, C, device);
    return weighted_sum(out, dout);
  };
  loss();
  layernorm_backward<float>(dinp, dweight, dbias, dout, inp, weight, mean, rstd, B, T, C, device);
  expect_slope(inp, dinp, loss, "inp");
  expect_slope(weight, dweight, loss, "weight");
  expect_slope(bias, dbias, loss, "bias");
}

TEST(FiniteDifferences, Attention) {
  Device device(1);
  const int B = 1, T = 7, C = 10, NH = 2;
  auto qkv = randoms<float>(1, 3 * T * C);
  const auto dout = randoms<float>(2, T * C);
  Guarded<float> out(T * C), lse(NH * T), dqkv(3 * T * C);
  const auto loss = [&] {
    attention_forward<float>(out, lse, qkv, B, T, C, NH, device);
    return weighted_sum(out, dout);
  };
  loss();
  attention_backward<float>(dqkv, dout, out, lse, qkv, B, T, C, NH, device);
  expect_slope(qkv, dqkv, loss, "qkv");
}

TEST(FiniteDifferences, Gelu) {
  Device device(1);
  auto inp = randoms<float>(1, 60, 2);
  const auto dout = randoms<float>(2, 60);
  Guarded<float> out(60), d(dout);
  const auto loss = [&] {
    gelu_forward<float>(out, inp, 60, device);
    return weighted_sum(out, dout);
  };
  gelu_backward<float>(d, inp, 60, device);
  expect_slope(inp, d, loss, "inp");
}

TEST(FiniteDifferences, MatmulIsItsOwnSlope) {
  Device device(1);
  const int B = 1, T = 3, C = 9, OC = 5;
  auto inp = randoms<float>(1, T * C), weight = randoms<float>(2, OC * C), bias = randoms<float>(3, OC);
  const auto dout = randoms<float>(4, T * OC);
  Guarded<float> out(T * OC), dinp(T * C), dweight(OC * C, 0), dbias(OC, 0);
  const auto loss = [&] {
    matmul_forward<float>(out, inp, weight, bias.data(), B, T, C, OC, device);
    return weighted_sum(out, dout);
  };
  matmul_backward<float>(dinp, dweight.data(), dbias.data(), dout, inp, weight, B, T, C, OC, device);
  expect_slope(inp, dinp, loss, "inp");
  expect_slope(weight, dweight, loss, "weight");
  expect_slope(bias, dbias, loss, "bias");
}

TEST(FiniteDifferences, Classifier) {
  Device device(1);
  const int rows = 2, V = 19, Vp = 128;
  auto logits = randoms<float>(1, rows * Vp);
  const std::vector<int> targets = {3, 18};
  Guarded<float> losses(rows), used(logits);
  const auto loss = [&] {
    fused_classifier<float>(losses, logits, targets.data(), 0, rows, V, Vp, false, device);
    return .7 * (static_cast<double>(losses[0]) + losses[1]);
  };
  fused_classifier<float>(losses, used, targets.data(), .7f, rows, V, Vp, true, device);
  expect_slope(logits, used, loss, "logits");
}

// Gradients that overflow when squared in fp32, the gap between two tensors, and plain numbers.
TYPED_TEST(LayersEdges, GlobalNorm) {
  using T = TypeParam;
  Device device;
  std::vector<Block> blocks;
  append_blocks(blocks, 0, 3, true);
  append_blocks(blocks, 64, block_elements + 1, false);
  Guarded<T> grads(64 + block_elements + 1, 0);
  EXPECT_EQ(norm_of<T>(grads, blocks, device), 0);
  store(grads[2], 3.0f);
  store(grads[63], 1e30f);  // between the tensors
  store(grads[64 + block_elements], -4.0f);
  EXPECT_EQ(norm_of<T>(grads, blocks, device), 5);
  grads.fill(0x1p100f);
  EXPECT_DOUBLE_EQ(norm_of<T>(grads, blocks, device), 0x1p100 * std::sqrt(3.0 + block_elements + 1));
  store(grads[70], NAN);
  EXPECT_TRUE(std::isnan(norm_of<T>(grads, blocks, device)));
}

}  // namespace
