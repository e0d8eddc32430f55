// The kernels of kernels/ but attention's, run on the CPU, against their CPU twins: odd sizes, every tail, poisoned
// outputs, guard bytes, every order of execution. Bits are demanded where kernel and twin do the same operations in the
// same order; elsewhere the tolerance stands beside its reason (kernel_runs.h).
#include <numeric>

#include "dev/tests/simt/kernel_runs.h"
#include "kernels/column_sums.cuh"
#include "kernels/encoder.cuh"
#include "kernels/fused_classifier.cuh"
#include "kernels/gelu.cuh"
#include "kernels/global_norm.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/matmul.cuh"

namespace {

using simt::Buffer;

template <class X>
class Layers : public testing::Test {};
using ElementTypes = testing::Types<float, bf16>;
struct TypeNames {
  template <class X>
  static std::string GetName(int) {
    return type_name<X>();
  }
};
TYPED_TEST_SUITE(Layers, ElementTypes, TypeNames);

// --- Encoder --------------------------------------------------------------------------------------------------------

TYPED_TEST(Layers, EncoderForward) {
  using X = TypeParam;
  const int B = 3, T = 5, V = 11;
  for (const int C : {1, 7, 8, 33, 48, 384, 520}) {
    const auto tokens = random_ids(B * T, V, 1);
    const auto wte = random_normal<X>(static_cast<size_t>(V * C), 2),
               wpe = random_normal<X>(static_cast<size_t>(T * C), 3);
    std::vector<X> out(static_cast<size_t>(B * T * C));
    encoder_forward_cpu(out.data(), tokens.data(), wte.data(), wpe.data(), B, T, C);
    Buffer<X> wte_d(wte), wpe_d(wpe);
    Buffer<int> tokens_d(tokens);
    const std::string what = "C = " + std::to_string(C);
    const auto got = in_every_order(
        [&] {
          Buffer<X> out_d(out.size(), "out");
          encoder_forward_cuda(out_d.data(), tokens_d.data(), wte_d.data(), wpe_d.data(), B, T, C, nullptr);
          return Results().add(out_d);
        },
        what);
    Comparison(got, what).equal(out, "out");  // one addition
  }
}

std::vector<int> buckets_of(const std::vector<int>& tokens, int V) {
  const int BT = static_cast<int>(tokens.size());
  std::vector<int> buckets(TokenBuckets::ints(BT) + 1, -77);
  bucket_tokens(buckets.data(), tokens.data(), BT, V);
  EXPECT_EQ(buckets.back(), -77) << "written past the end";
  buckets.pop_back();
  return buckets;
}

// Every position in one run of its token, in order; runs of long tokens in slots of their own, within the bounds.
TEST(Buckets, HoldEveryPositionOnce) {
  constexpr int length = TokenBuckets::run_length;
  std::vector<std::vector<int>> batches = {random_ids(1, 5, 1), random_ids(500, 7, 2), random_ids(500, 400, 3)};
  for (const int n : {length - 1, length, length + 1, 2 * length, 2 * length + 1, 1000}) batches.emplace_back(n, 3);
  batches.push_back(random_ids(5 * (length + 1), 5, 0));
  std::iota(batches.back().begin(), batches.back().end(), 0);
  for (int& token : batches.back()) token %= 5;  // five tokens, each one position longer than a run
  for (const auto& tokens : batches) {
    const int BT = static_cast<int>(tokens.size());
    const auto data = buckets_of(tokens, 512);
    const TokenBuckets b(data.data(), BT);
    std::vector<int> seen(tokens.size()), slots;
    int next = 0, last_token = -1;
    for (int i = 0; i < b.runs(); i++) {
      const auto run = b.run(i);
      ASSERT_EQ(run.begin, next);
      ASSERT_TRUE(run.n >= 1 && run.n <= length);
      ASSERT_GE(run.token, last_token);
      for (int k = 0; k < run.n; k++) {
        const int position = b.positions()[run.begin + k];
        ASSERT_EQ(tokens[static_cast<size_t>(position)], run.token);
        ASSERT_TRUE(k == 0 || position > b.positions()[run.begin + k - 1]);
        seen[static_cast<size_t>(position)]++;
      }
      if (run.slot >= 0) slots.push_back(run.slot);
      ASSERT_EQ(run.slot < 0 && run.token == last_token, false) << "two warps would add to one row";
      next += run.n, last_token = run.token;
    }
    for (const int s : seen) ASSERT_EQ(s, 1);
    for (size_t i = 0; i < slots.size(); i++) ASSERT_EQ(slots[i], static_cast<int>(i));
    int slot = 0;
    for (int i = 0; i < b.long_tokens(); i++) {
      ASSERT_EQ(b.long_token(i).slot, slot);
      slot += b.long_token(i).runs;
    }
    ASSERT_EQ(slot, static_cast<int>(slots.size()));
    ASSERT_LE(slot, TokenBuckets::max_slots(BT));
    ASSERT_LE(b.long_tokens(), TokenBuckets::max_long_tokens(BT));
  }
}

// Two micro-batches onto what is there. long_runs: some token has more positions than a run.
template <class X>
void encoder_backward_test(const std::vector<int>& tokens, int B, int T, int C, int V, bool long_runs) {
  const auto dout = random_normal<X>(static_cast<size_t>(B * T * C), 4);
  const auto dwte0 = random_normal<float>(static_cast<size_t>(V * C), 5);
  const auto dwpe0 = random_normal<X>(static_cast<size_t>(T * C), 6);
  std::vector<float> dwte = dwte0;
  std::vector<X> dwpe = dwpe0;
  for (int i = 0; i < 2; i++) encoder_backward_cpu(dwte.data(), dwpe.data(), dout.data(), tokens.data(), B, T, C);
  Buffer<X> dout_d(dout);
  Buffer<int> buckets_d(buckets_of(tokens, V));
  const std::string what = strf("B = %d, T = %d, C = %d", B, T, C);
  const auto got = in_every_order(
      [&] {
        Buffer<float> dwte_d(dwte0, "dwte"), scratch(encoder_backward_scratch(B, T, C), "scratch");
        Buffer<X> dwpe_d(dwpe0, "dwpe");
        for (int i = 0; i < 2; i++)
          encoder_backward_cuda(dwte_d.data(), dwpe_d.data(), dout_d.data(), buckets_d.data(), scratch.data(), B, T, C,
                                nullptr);
        return Results().add(dwte_d).add(dwpe_d);
      },
      what);
  Comparison comparison(got, what);
  // In another order where the token is long: up to 2 * 335 additions, each off by half an ulp of a sum below 128,
  // whose errors add up like a random walk: 26 * 2^-18 = 1e-4.
  if (long_runs)
    comparison.near(dwte, "dwte", 0, 5e-4);
  else
    comparison.equal(dwte, "dwte");
  comparison.equal(dwpe, "dwpe");
}
TYPED_TEST(Layers, EncoderBackward) {
  for (const int C : {1, 33, 48, 264}) encoder_backward_test<TypeParam>(random_ids(3 * 7, 5, 7), 3, 7, C, 6, false);
}
TEST(Encoder, BackwardWithMoreRunsThanWarps) {
  encoder_backward_test<float>(random_ids(9 * 1000, 30000, 9), 9, 1000, 1, 30000, false);
}
TYPED_TEST(Layers, EncoderBackwardWithFrequentTokens) {
  for (const int C : {33, 48}) {
    encoder_backward_test<TypeParam>(std::vector<int>(5 * 67, 2), 5, 67, C, 4, true);  // all equal
    auto tokens = random_ids(4 * 100, 3, 8);  // three long ones and one single position
    tokens[77] = 3;
    encoder_backward_test<TypeParam>(tokens, 4, 100, C, 4, true);
  }
}

TYPED_TEST(Layers, AddEmbeddingGradient) {
  using X = TypeParam;
  for (const size_t n : {1, 7, 8, 9, 2047, 2048, 2055}) {
    const auto dwte0 = random_normal<X>(n, 9);
    const auto scratch = random_normal<float>(n, 10);
    std::vector<X> dwte = dwte0;
    add_embedding_gradient_cpu(dwte.data(), scratch.data(), n);
    Buffer<float> scratch_d(scratch);
    const std::string what = "n = " + std::to_string(n);
    const auto got = in_every_order(
        [&] {
          Buffer<X> dwte_d(dwte0, "dwte");
          add_embedding_gradient_cuda(dwte_d.data(), scratch_d.data(), n, nullptr);
          return Results().add(dwte_d);
        },
        what);
    Comparison(got, what).equal(dwte, "dwte");
  }
}

// --- LayerNorm ------------------------------------------------------------------------------------------------------

// Widths of 16 bytes and of one element; rows in registers (2, 4, 8 runs a lane) and rows that are read again.
const int layernorm_channels[] = {1, 33, 48, 384, 768, 1600, 1601, 2056};

template <class X>
void layernorm_forward_test(int rows, int C, bool with_residual) {
  const size_t n = static_cast<size_t>(rows) * C;
  const auto inp1 = random_normal<X>(n, 1, 1.0f, 0.5f), inp2 = random_normal<X>(n, 2);
  const auto weight = random_normal<X>(static_cast<size_t>(C), 3), bias = random_normal<X>(static_cast<size_t>(C), 4);
  std::vector<X> residual(n), out(n);
  std::vector<float> mean(static_cast<size_t>(rows)), rstd(mean.size());
  if (with_residual)
    residual_layernorm_forward_cpu(residual.data(), out.data(), mean.data(), rstd.data(), inp1.data(), inp2.data(),
                                   weight.data(), bias.data(), rows, 1, C);
  else
    layernorm_forward_cpu(out.data(), mean.data(), rstd.data(), inp1.data(), weight.data(), bias.data(), rows, 1, C);
  Buffer<X> inp1_d(inp1), inp2_d(inp2), weight_d(weight), bias_d(bias);
  const std::string what = strf("rows = %d, C = %d, residual %d", rows, C, with_residual);
  const auto got = in_every_order(
      [&] {
        Buffer<X> residual_d(n, "residual"), out_d(n, "out");
        Buffer<float> mean_d(mean.size(), "mean"), rstd_d(rstd.size(), "rstd");
        Results results;
        if (with_residual) {
          residual_layernorm_forward_cuda(residual_d.data(), out_d.data(), mean_d.data(), rstd_d.data(), inp1_d.data(),
                                          inp2_d.data(), weight_d.data(), bias_d.data(), rows, 1, C, nullptr);
          results.add(residual_d);
        } else {
          layernorm_forward_cuda(out_d.data(), mean_d.data(), rstd_d.data(), inp1_d.data(), weight_d.data(),
                                 bias_d.data(), rows, 1, C, nullptr);
        }
        return results.add(out_d).add(mean_d).add(rstd_d);
      },
      what);
  Comparison comparison(got, what);
  if (with_residual) comparison.equal(residual, "residual");
  // Sums of up to 2,056 terms of size 1 to 2 in two orders, each at most 100 additions deep: 100 * 2^-24 of their sum,
  // over C. out is of size 1 to 4; for C = 1 it is the bias exactly, since x - mean is 0.
  comparison.near(out, "out", 1e-5, 2e-5);
  comparison.near(mean, "mean", 0, 1e-5);
  comparison.near(rstd, "rstd", 1e-5, 0);
}
TYPED_TEST(Layers, LayerNormForward) {
  for (const int C : layernorm_channels) layernorm_forward_test<TypeParam>(13, C, false);
  layernorm_forward_test<TypeParam>(1, 48, false);
}
TYPED_TEST(Layers, ResidualLayerNormForward) {
  for (const int C : layernorm_channels) layernorm_forward_test<TypeParam>(9, C, true);
}

// Two micro-batches: everything is added to what is there.
template <class X>
void layernorm_backward_test(int rows, int C) {
  const size_t n = static_cast<size_t>(rows) * C, channels = static_cast<size_t>(C);
  const auto inp = random_normal<X>(n, 1), dout = random_normal<X>(n, 2), dinp0 = random_normal<X>(n, 3);
  const auto weight = random_normal<X>(channels, 4), dweight0 = random_normal<X>(channels, 5);
  const auto dbias0 = random_normal<X>(channels, 6);
  std::vector<X> out(n), dinp = dinp0, dweight = dweight0, dbias = dbias0;
  std::vector<float> mean(static_cast<size_t>(rows)), rstd(mean.size());
  layernorm_forward_cpu(out.data(), mean.data(), rstd.data(), inp.data(), weight.data(), weight.data(), rows, 1, C);
  for (int i = 0; i < 2; i++)
    layernorm_backward_cpu(dinp.data(), dweight.data(), dbias.data(), dout.data(), inp.data(), weight.data(),
                           mean.data(), rstd.data(), rows, 1, C);
  Buffer<X> inp_d(inp), dout_d(dout), weight_d(weight);
  Buffer<float> mean_d(mean), rstd_d(rstd);
  const std::string what = strf("rows = %d, C = %d", rows, C);
  const auto got = in_every_order(
      [&] {
        Buffer<X> dinp_d(dinp0, "dinp"), dweight_d(dweight0, "dweight"), dbias_d(dbias0, "dbias");
        Buffer<float> scratch(layernorm_backward_scratch(rows, C), "scratch");
        for (int i = 0; i < 2; i++)
          layernorm_backward_cuda(dinp_d.data(), dweight_d.data(), dbias_d.data(), dout_d.data(), inp_d.data(),
                                  weight_d.data(), mean_d.data(), rstd_d.data(), scratch.data(), rows, 1, C, nullptr);
        return Results().add(dinp_d).add(dweight_d).add(dbias_d);
      },
      what);
  Comparison comparison(got, what);
  // dinp: terms of size up to 4, and two sums over C of them, divided by C. In bf16 the first micro-batch may round to
  // the neighbouring value of size 8, half a step of which is 0.03, and the second then starts from there.
  const double first_rounding = std::is_same_v<X, bf16> ? 0.04 : 0.0;
  // rstd of rows with a single channel is 316, so results are larger; else sums of `rows` terms of size 1 to 4.
  const double size = C == 1 ? 300 : 1, sum_rounding = std::is_same_v<X, bf16> ? 0x1p-8 * 4 * std::sqrt(rows) : 0.0;
  comparison.near(dinp, "dinp", 1e-5, size * 2e-5 + first_rounding);
  comparison.near(dweight, "dweight", 0, size * rows * 2e-6 + sum_rounding);
  comparison.near(dbias, "dbias", 0, rows * 2e-6 + sum_rounding);
}
TYPED_TEST(Layers, LayerNormBackward) {
  for (const int C : layernorm_channels) layernorm_backward_test<TypeParam>(13, C);
  layernorm_backward_test<TypeParam>(1, 48);
  layernorm_backward_test<TypeParam>(66, 40);
}
// More channels a thread (chunks of 2, 4, 8, 16), in both widths.
TYPED_TEST(Layers, LayerNormBackwardOfLongRows) {
  constexpr int w = lane_width<TypeParam>;
  for (const int C : {512 * w + w, 1024 * w + w, 12288, 1023, 1025, 2051, 4097})
    layernorm_backward_test<TypeParam>(3, C);
  EXPECT_THROW(layernorm_backward_test<TypeParam>(1, 8193), RunError);
}
// More rows than the grid takes at once: 128 blocks of four.
TEST(LayerNorm, BackwardOfManyRows) { layernorm_backward_test<bf16>(517, 8 * 384); }

// --- GELU -----------------------------------------------------------------------------------------------------------

TYPED_TEST(Layers, Gelu) {
  using X = TypeParam;
  for (const size_t n : {1, 7, 8, 9, 2047, 2048, 2055}) {
    auto inp = random_normal<X>(n, 1, 3.0f);
    const auto d0 = random_normal<X>(n, 2);
    const float special[] = {0.0f, -0.0f, 40.0f, -40.0f, 1e4f, -1e4f, 1e30f, NAN};
    for (size_t i = 0; i < std::size(special) && i < n; i++) store(inp[n - 1 - i], special[i]);
    std::vector<X> out(n), d = d0;
    gelu_forward_cpu(out.data(), inp.data(), n);
    gelu_backward_cpu(d.data(), inp.data(), n);
    Buffer<X> inp_d(inp);
    const std::string what = "n = " + std::to_string(n);
    const auto got = in_every_order(
        [&] {
          Buffer<X> out_d(n, "out"), d_d(d0, "d");
          gelu_forward_cuda(out_d.data(), inp_d.data(), n, nullptr);
          gelu_backward_cuda(d_d.data(), inp_d.data(), n, nullptr);
          return Results().add(out_d).add(d_d);
        },
        what);
    Comparison comparison(got, what);
    // The exponential is off by 2^-22 + 1.5 |2y| 2^-24, and where gelu is not tiny |2y| < 16: 2e-6. The slope is a sum
    // of terms of size up to 1 that cancel near -0.75, times d of size up to 4; below -5 both vanish as e^2y does.
    comparison.near(out, "out", 4e-6, 1e-30);
    comparison.near(d, "d", 4e-6, 4e-6);
  }
}

// --- Classifier -----------------------------------------------------------------------------------------------------

struct Logits {
  float mean, deviation;
};

template <class X>
void classifier_test(int rows, int V, int Vp, Logits kind, bool write, int repeats = 0) {
  const size_t n = static_cast<size_t>(rows) * Vp;
  auto logits0 = random_normal<X>(n, 1, kind.deviation, kind.mean);
  for (int r = 0; r < rows; r++)
    for (int v = V; v < Vp; v++) store(logits0[static_cast<size_t>(r) * Vp + v], r % 2 ? 1e30f : NAN);
  auto targets = random_ids(static_cast<size_t>(rows), V, 2);
  targets[0] = V - 1;
  if (rows > 1) store(logits0[static_cast<size_t>(Vp) + (targets[1] + 1) % V], -INFINITY);
  const float dloss = 0.25f;
  std::vector<X> logits = logits0;
  std::vector<float> losses(static_cast<size_t>(rows));
  fused_classifier_cpu(losses.data(), logits.data(), targets.data(), dloss, rows, V, Vp, write);
  Buffer<int> targets_d(targets);
  const std::string what = strf("V = %d, Vp = %d, logits %g +- %g", V, Vp, kind.mean, kind.deviation);
  const auto run = [&] {
    Buffer<X> logits_d(logits0, "logits");
    Buffer<float> losses_d(losses.size(), "losses");
    fused_classifier_cuda(losses_d.data(), logits_d.data(), targets_d.data(), dloss, rows, V, Vp, write, nullptr);
    return Results().add(losses_d).add(logits_d);
  };
  const auto got = in_every_order(run, what);
  Comparison comparison(got, what);
  // Losses: log of a sum of V exponentials, off by 2^-22 each at the top and by 1.5 |x| 2^-24 below; the maximum is
  // then added, of size |mean| + 5 deviations. Gradients: probabilities, relatively off by twice that.
  const double size = std::fabs(kind.mean) + 5 * kind.deviation;
  comparison.near(losses, "losses", 2e-6, 2e-6 + size * 2e-7);
  if (write)
    comparison.near(logits, "dlogits", 1e-5 + size * 4e-7, 1e-9);
  else
    comparison.equal(logits, "logits");
  for (int r = 0; write && r < rows; r++)
    for (int v = V; v < Vp; v++)
      ASSERT_EQ(got[losses.size() + static_cast<size_t>(r) * Vp + static_cast<size_t>(v)], 0.0f) << what << " padding";
  for (int i = 0; i < repeats; i++) {
    const std::vector<float> again = run();
    ASSERT_EQ(memcmp(again.data(), got.data(), got.size() * sizeof(float)), 0) << what << ", run " << i;
  }
}
TYPED_TEST(Layers, Classifier) {
  for (const int V : {97, 249, 250, 251, 252, 253, 254, 255, 256, 257, 8003})
    classifier_test<TypeParam>(3, V, round_up(V, 128), {0, 3}, true);
  classifier_test<TypeParam>(3, 257, 257, {0, 3}, true);  // rows that start at odd addresses
  classifier_test<TypeParam>(3, 97, 97, {0, 1e4}, true);
  classifier_test<TypeParam>(2, 2, 128, {0, 0}, true);  // all equal
  classifier_test<TypeParam>(3, 97, 128, {0, 3}, false);
}
TYPED_TEST(Layers, ClassifierOfGpt2) { classifier_test<TypeParam>(2, 50257, 50304, {-3, 3}, true); }
TYPED_TEST(Layers, ClassifierGivesEqualBitsFiftyTimes) { classifier_test<TypeParam>(3, 257, 384, {-100, 3}, true, 50); }

// --- Sums over rows, and the norm -----------------------------------------------------------------------------------

TYPED_TEST(Layers, BiasBackward) {
  using X = TypeParam;
  for (const auto& [rows, OC] : {std::pair{1, 1}, {63, 7}, {64, 33}, {65, 48}, {777, 264}, {8200, 40}}) {
    const auto dout = random_normal<X>(static_cast<size_t>(rows) * OC, 1);
    const auto dbias0 = random_normal<X>(static_cast<size_t>(OC), 2);
    std::vector<X> dbias = dbias0;
    for (int i = 0; i < 2; i++) bias_backward_cpu(dbias.data(), dout.data(), rows, OC);
    Buffer<X> dout_d(dout);
    const std::string what = strf("rows = %d, OC = %d", rows, OC);
    const auto got = in_every_order(
        [&] {
          Buffer<X> dbias_d(dbias0, "dbias");
          Buffer<float> scratch(bias_backward_scratch(rows, OC), "scratch");
          for (int i = 0; i < 2; i++)
            bias_backward_cuda(dbias_d.data(), dout_d.data(), scratch.data(), rows, OC, nullptr);
          return Results().add(dbias_d);
        },
        what);
    // `rows` terms of size 1 in two orders; in bf16 the first micro-batch's rounding on top.
    const double first_rounding = std::is_same_v<X, bf16> ? 0x1p-8 * 4 * std::sqrt(rows) : 0.0;
    Comparison(got, what).near(dbias, "dbias", 0, rows * 2e-6 + first_rounding);
  }
}

TYPED_TEST(Layers, GlobalNorm) {
  using X = TypeParam;
  for (const float deviation : {1e-3f, 1e25f}) {  // squares beyond fp32's range
    std::vector<Block> blocks;
    size_t n = 0;
    for (const size_t tensor : {size_t{1}, block_elements + 13, size_t{777}, size_t{8}, 3 * block_elements}) {
      append_blocks(blocks, n, tensor, true);
      n += (tensor + tensor_alignment - 1) / tensor_alignment * tensor_alignment;
    }
    auto grads = random_normal<X>(n, 1, deviation);
    std::vector<double> squares(blocks.size());
    block_squares_cpu(squares.data(), grads.data(), blocks.data(), blocks.size());
    const double norm = norm_of_squares_cpu(squares.data(), squares.size());
    for (size_t b = 0, i = 0; i < n; i++) {  // what lies between the tensors is nobody's
      while (b < blocks.size() && i >= blocks[b].begin + blocks[b].n) b++;
      if (b == blocks.size() || i < blocks[b].begin) store(grads[i], NAN);
    }
    Buffer<X> grads_d(grads);
    Buffer<Block> blocks_d(blocks);
    double first = 0;
    for (const auto& order : simt::orders()) {
      simt::options() = order;
      Buffer<double> partial(blocks.size(), "partial"), norm_d(1, "norm");
      block_squares_cuda(partial.data(), grads_d.data(), blocks_d.data(), blocks.size(), nullptr);
      norm_of_squares_cuda(norm_d.data(), partial.data(), blocks.size(), nullptr);
      const double got = norm_d.values()[0];
      EXPECT_NEAR(got, norm, 1e-13 * norm);  // double sums of 33,000 squares in two orders
      if (first == 0) first = got;
      EXPECT_EQ(got, first) << simt::describe(order);
    }
    simt::options() = {};
  }
}
// More partial sums than the second stage has threads.
TEST(GlobalNorm, AddsPartialSumsOfManyBlocks) {
  std::vector<double> partial(2500);
  std::iota(partial.begin(), partial.end(), 1.0);
  Buffer<double> partial_d(partial), norm(1);
  norm_of_squares_cuda(norm.data(), partial_d.data(), partial.size(), nullptr);
  EXPECT_EQ(norm.values()[0], std::sqrt(2500.0 * 2501 / 2));  // integers: every order gives the exact sum
}

}  // namespace
