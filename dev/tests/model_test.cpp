// train_gpt.cu: the whole model against PyTorch (dev/tests/oracle/model.py): logits, loss, every gradient, and the loss
// curve of ten AdamW steps; and that batches, threads and padding change nothing that they must not.
//
// Tolerance against PyTorch as in layers_test.cpp: twice what PyTorch in the same type is off from the true value,
// plus a slack of some unit roundoffs of the tensor's largest value. But the largest error may be three times PyTorch's:
// of a bias it is one draw, which the order of the products' sums decides (3.1 times with oneDNN's AVX-512 kernels, of
// which the slack takes a part, 1.7 times with those for AVX2; the rms errors are alike).
#define TRAIN_GPT_NO_MAIN
#include "train_gpt.cu"

#include <gtest/gtest.h>

#include "dev/tests/golden.h"
#include "dev/tests/numbers.h"
#include "dev/tests/optimizing.h"

namespace {

template <class floatX>
double take_loss(GPT<floatX>& model) {
  double sum = 0;
  for (const double loss : model.take_losses()) sum += loss;
  return sum;
}
template <class floatX>
void backward(GPT<floatX>& model, const int* tokens, const int* targets, float scale, int B, int T) {
  model.loss_and_backward(tokens, targets, scale, B, T, [](size_t, size_t) {});
}

class OracleModel {
 public:
  Golden golden{"model"};
  ModelConfig config;
  int B, T;

  OracleModel() {
    const std::vector<int> s = golden.i32("sizes");
    config.L = s[0], config.NH = s[1], config.C = s[2], config.max_T = s[4], config.V = s[5], config.Vp = 128;
    T = s[3], B = s[6];
    text_ = golden.i32("text");
  }
  std::vector<int> tokens(int batch) const { return part(batch, 0); }
  std::vector<int> targets(int batch) const { return part(batch, 1); }

  template <class floatX>
  void load(GPT<floatX>& model) const {
    for (const auto& parameter : model.table.parameters) {
      const std::vector<float> x = golden.f32("param/" + parameter.name);
      ASSERT_EQ(static_cast<int64_t>(x.size()), parameter.used_rows * parameter.columns) << parameter.name;
      for (size_t i = 0; i < x.size(); i++) store(model.params()[parameter.begin + i], x[i]);
    }
  }

 private:
  // The rows of a batch without their last token, or without their first.
  std::vector<int> part(int batch, int from) const {
    std::vector<int> out;
    for (int b = 0; b < B; b++)
      for (int t = 0; t < T; t++) out.push_back(text_[static_cast<size_t>((batch * B + b) * (T + 1) + t + from)]);
    return out;
  }
  std::vector<int> text_;
};

// units: the slack, in unit roundoffs of floatX of the largest true value.
template <class floatX>
void expect_close(const Golden& golden, const std::string& tensor, const std::vector<double>& x, double units) {
  const std::vector<float> truth = golden.f32(tensor);
  const auto other = golden.get<double>(tensor + (sizeof(floatX) == 4 ? ".fp32_error" : ".bf16_error"));
  ASSERT_EQ(x.size(), truth.size()) << tensor;
  double worst = 0, squares = 0, largest = 0;
  for (size_t i = 0; i < x.size(); i++) {
    ASSERT_TRUE(std::isfinite(x[i])) << tensor << "[" << i << "]";
    worst = std::max(worst, std::fabs(x[i] - truth[i]));
    squares += (x[i] - truth[i]) * (x[i] - truth[i]);
    largest = std::max(largest, std::fabs(static_cast<double>(truth[i])));
  }
  const double slack = units * largest * (sizeof(floatX) == 4 ? 0x1p-24 : 0x1p-9);
  EXPECT_LE(worst, 3 * other[0] + slack) << tensor << ", largest error";
  EXPECT_LE(std::sqrt(squares / static_cast<double>(x.size())), 2 * other[1] + slack / 4) << tensor << ", rms error";
}

template <class floatX>
class Model : public testing::Test {
 protected:
  OracleModel oracle_;
  Device device_;
  const int B_ = oracle_.B, T_ = oracle_.T;
};
struct Names {
  template <class T>
  static std::string GetName(int) {
    return sizeof(T) == 4 ? "fp32" : "bf16";
  }
};
using Types = testing::Types<float, bf16>;
TYPED_TEST_SUITE(Model, Types, Names);

TYPED_TEST(Model, LogitsEqualPyTorch) {
  GPT<TypeParam> model(this->oracle_.config, 1, this->T_, Recompute::gelu, 1, this->device_);
  this->oracle_.load(model);
  const auto tokens = this->oracle_.tokens(0);
  std::vector<double> logits;
  for (int b = 0; b < this->B_; b++) {
    model.forward(&tokens[static_cast<size_t>(b * this->T_)], 1, this->T_);
    for (int t = 0; t < this->T_; t++) {
      const auto row = model.logits(t);
      for (const auto logit : row) logits.push_back(to_float(logit));
    }
  }
  expect_close<TypeParam>(this->oracle_.golden, "logits", logits, 4);
}

TYPED_TEST(Model, LossAndGradientsEqualPyTorch) {
  const int B = this->B_, T = this->T_;
  GPT<TypeParam> model(this->oracle_.config, B, T, Recompute::gelu, 1, this->device_);
  this->oracle_.load(model);
  const auto tokens = this->oracle_.tokens(0), targets = this->oracle_.targets(0);
  model.forward(tokens.data(), B, T);
  const float scale = 1.0f / static_cast<float>(B * T);
  model.loss(targets.data(), B, T);
  const double only_loss = take_loss(model);
  backward(model, tokens.data(), targets.data(), scale, B, T);
  const double loss = take_loss(model);
  EXPECT_EQ(only_loss, loss) << "the loss must not depend on whether its gradient is wanted";
  expect_close<TypeParam>(this->oracle_.golden, "loss", {loss / (B * T)}, 4);
  size_t elements = 0;
  for (const auto& parameter : model.table.parameters) {
    const size_t used = static_cast<size_t>(parameter.used_rows * parameter.columns);
    std::vector<double> gradient(used);
    for (size_t i = 0; i < used; i++) gradient[i] = to_float(model.grads()[parameter.begin + i]);
    expect_close<TypeParam>(this->oracle_.golden, "grad/" + parameter.name, gradient, 4);
    for (size_t i = used; i < parameter.n(); i++)
      EXPECT_EQ(to_float(model.grads()[parameter.begin + i]), 0) << "padding of " << parameter.name;
    elements += used;
  }
  EXPECT_EQ(static_cast<int64_t>(elements), model.table.count);
}

// The plan's shortcut, for models whose cut falls within a tensor, on its border, and beyond all blocks.
TEST(ParameterTable, FirstPartIsThatOfTheCut) {
  for (const auto& [L, C, V] : {std::array{1, 4, 97}, {2, 96, 257}, {3, 128, 8192}, {12, 768, 50257}}) {
    ModelConfig c;
    c.L = L, c.C = C, c.NH = 1, c.max_T = 64, c.V = V, c.Vp = (V + 127) / 128 * 128;
    const ParameterTable table = parameter_table(c);
    EXPECT_EQ(table.n_blocks, table.blocks.size());
    EXPECT_EQ(parameter_table(c, false).n_blocks, table.n_blocks);
    for (const int ranks : {1, 2, 3, 4, 7, 8, 64, 1000, 65536})
      EXPECT_EQ(table.first_part(ranks), cut_blocks(table.blocks, table.elements, ranks).part(0).n())
          << L << " layers, " << ranks << " ranks";
  }
}

// Ten steps on ten batches. Decay on matrices, embeddings included, none on biases and LayerNorm; clipping in about
// half of the steps.
TEST(LossCurve, TenAdamWStepsEqualPyTorch) {
  const OracleModel oracle;
  Device device;
  const int B = oracle.B, T = oracle.T;
  GPT<float> model(oracle.config, B, T, Recompute::gelu, 1, device);
  oracle.load(model);
  const auto optimizer = make_optimizer<Fp32>(model.params(), model.blocks, model.table.elements, device);
  const auto hyper = oracle.golden.get<double>("hyper");
  std::vector<double> losses, norms;
  const int steps = oracle.golden.shape("curve/loss")[0];
  for (int step = 0; step < steps; step++) {
    const auto tokens = oracle.tokens(step), targets = oracle.targets(step);
    model.zero_gradients();
    model.forward(tokens.data(), B, T);
    backward(model, tokens.data(), targets.data(), 1.0f / static_cast<float>(B * T), B, T);
    losses.push_back(take_loss(model) / (B * T));
    norms.push_back(norm_of(model.grads(), model.table.blocks, device));
    const AdamWScalars k =
        adamw_scalars(hyper[0], hyper[1], hyper[2], hyper[3], hyper[4], hyper[5], norms.back(), step + 1);
    update(*optimizer, model.params(), model.grads(), k, hyper[5], norms.back(), false, device);
  }
  expect_close<float>(oracle.golden, "curve/loss", losses, 4);
  expect_close<float>(oracle.golden, "curve/grad_norm", norms, 16);
  for (const auto& parameter : model.table.parameters) {
    const std::string tensor = "trained/" + parameter.name;
    const size_t used = static_cast<size_t>(parameter.used_rows * parameter.columns);
    const float* w = model.params() + parameter.begin;
    if (oracle.golden.has(tensor)) expect_close<float>(oracle.golden, tensor, {w, w + used}, 8);
    for (size_t i = used; i < parameter.n(); i++) ASSERT_EQ(w[i], 0) << "padding of " << parameter.name;
  }
}

// Loss and gradients as bytes, of micro-batches of `rows` sequences each.
template <class floatX>
std::string gradients(const OracleModel& oracle, int threads, int micro_batches, std::vector<double>* as_numbers,
                      Recompute recompute = Recompute::gelu) {
  Device device(threads);
  const int B = oracle.B / micro_batches, T = oracle.T;
  GPT<floatX> model(oracle.config, B, T, recompute, 1, device);
  oracle.load(model);
  double loss = 0;
  const auto tokens = oracle.tokens(0), targets = oracle.targets(0);
  for (int i = 0; i < micro_batches; i++) {
    const size_t from = static_cast<size_t>(i * B * T);
    model.forward(&tokens[from], B, T);
    backward(model, &tokens[from], &targets[from], 1.0f / static_cast<float>(oracle.B * T), B, T);
    loss += take_loss(model);
  }
  if (as_numbers)
    for (size_t i = 0; i < model.table.elements; i++) as_numbers->push_back(to_float(model.grads()[i]));
  std::string bytes(reinterpret_cast<const char*>(model.grads()), model.table.elements * sizeof(floatX));
  return bytes.append(reinterpret_cast<const char*>(&loss), sizeof(loss));
}

TYPED_TEST(Model, ThreadsChangeNoBit) {
  const std::string one = gradients<TypeParam>(this->oracle_, 1, 1, nullptr);
  for (const int threads : {2, 4})
    EXPECT_TRUE(gradients<TypeParam>(this->oracle_, threads, 1, nullptr) == one) << threads << " threads";
}

// What is computed again is computed from the same stored values by the same operations.
TYPED_TEST(Model, RecomputationChangesNoBit) {
  const std::string all_kept = gradients<TypeParam>(this->oracle_, 2, 1, nullptr, Recompute::none);
  for (const auto level : {Recompute::gelu, Recompute::layernorm, Recompute::block})
    EXPECT_TRUE(gradients<TypeParam>(this->oracle_, 2, 1, nullptr, level) == all_kept) << static_cast<int>(level);
}

// What is allocated is what the sizes say, by class; workspace also holds the threads' scratch.
TYPED_TEST(Model, AllocatesWhatItsSizesSay) {
  const ModelConfig c = this->oracle_.config;
  const int B = this->B_, T = this->T_;
  Device device(1);
  const GPT<TypeParam> model(c, B, T, Recompute::none, 1, device);
  const size_t BT = static_cast<size_t>(B * T), C = static_cast<size_t>(c.C), L = static_cast<size_t>(c.L);
  const auto padded = [](size_t bytes) { return (bytes + 63) / 64 * 64; };
  const size_t layer =
      16 * padded(BT * C * sizeof(TypeParam)) +  // ln1 ln2 atty residual2 residual3, qkv, fch, fch_gelu
      4 * padded(BT * 4) + padded(BT * static_cast<size_t>(c.NH) * 4);
  const size_t qkv = padded(3 * BT * C * sizeof(TypeParam)) - 3 * padded(BT * C * sizeof(TypeParam));
  const size_t fch = padded(4 * BT * C * sizeof(TypeParam)) - 4 * padded(BT * C * sizeof(TypeParam));
  const size_t activations = L * (layer + qkv + 2 * fch) + 2 * padded(BT * C * sizeof(TypeParam)) + 3 * padded(BT * 4);
  EXPECT_EQ(device.bytes(Memory::activations), static_cast<int64_t>(activations));
  EXPECT_EQ(device.bytes(Memory::weights), static_cast<int64_t>(model.table.elements * sizeof(TypeParam)));
  EXPECT_EQ(device.bytes(Memory::gradients), device.bytes(Memory::weights));
}

// Two micro-batches of one sequence against one of two: the same sums, rounded to the type once more in between. Bound
// in bf16: a unit roundoff for each of the two stored partial sums and one for the total, of the largest gradient; in
// fp32 8 units, since sums are in another order as well.
TYPED_TEST(Model, AccumulationEqualsOneBatch) {
  std::vector<double> whole, parts;
  gradients<TypeParam>(this->oracle_, 2, 1, &whole);
  gradients<TypeParam>(this->oracle_, 2, 2, &parts);
  double largest = 0, worst = 0;
  for (size_t i = 0; i < whole.size(); i++) {
    largest = std::max(largest, std::fabs(whole[i]));
    worst = std::max(worst, std::fabs(whole[i] - parts[i]));
  }
  EXPECT_GT(largest, .1);
  EXPECT_LE(worst, largest * (sizeof(TypeParam) == 4 ? 8 * 0x1p-24 : 3 * 0x1p-9));
}

// The loss of a sequence does not depend on its neighbours in the batch, nor on what follows a token.
TYPED_TEST(Model, SequencesAreIndependentAndCausal) {
  const int B = this->B_, T = this->T_;
  GPT<TypeParam> pair(this->oracle_.config, B, T, Recompute::gelu, 1, this->device_);
  GPT<TypeParam> single(this->oracle_.config, 1, T, Recompute::gelu, 1, this->device_);
  this->oracle_.load(pair);
  this->oracle_.load(single);
  auto tokens = this->oracle_.tokens(0);
  const auto targets = this->oracle_.targets(0);
  pair.forward(tokens.data(), B, T);
  pair.loss(targets.data(), B, T);
  const double together = take_loss(pair);
  double apart = 0;
  for (int b = 0; b < B; b++) {
    single.forward(&tokens[static_cast<size_t>(b * T)], 1, T);
    single.loss(&targets[static_cast<size_t>(b * T)], 1, T);
    apart += take_loss(single);
  }
  EXPECT_NEAR(together, apart, 1e-7 * together);  // products of another height may sum in another order
  single.forward(tokens.data(), 1, T);
  const auto before = single.logits(T / 2);
  tokens[static_cast<size_t>(T / 2) + 1] = (tokens[static_cast<size_t>(T / 2) + 1] + 1) % this->oracle_.config.V;
  single.forward(tokens.data(), 1, T);
  const auto after = single.logits(T / 2);
  EXPECT_EQ(memcmp(after.data(), before.data(), before.size() * sizeof(TypeParam)), 0)
      << "a later token changed a logit";
}

}  // namespace
