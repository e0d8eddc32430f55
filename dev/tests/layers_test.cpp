// kernels/: every layer forward and backward against PyTorch autograd (dev/tests/oracle/layers.py), all buffers between
// guard bytes, sizes odd and even.
//
// Tolerance: against the true value (computed in double) a kernel may be off by twice what PyTorch is off in the same
// type, in the largest and in the root mean square error, plus a slack. Twice, because two sums of the same numbers in
// another order are independent draws of the same rounding errors. The slack is for results that PyTorch gets exactly
// or nearly so by luck: in bf16 one unit roundoff (2^-9) of the largest true value, in fp32 two (2^-24 each), or as
// many as stated where a kernel's formula loses more than PyTorch's.
#include <gtest/gtest.h>

#include "dev/tests/golden.h"
#include "dev/tests/guarded.h"
#include "kernels/attention.cuh"
#include "kernels/encoder.cuh"
#include "kernels/fused_classifier.cuh"
#include "kernels/gelu.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/matmul.cuh"

namespace {

// One case of a golden file: its inputs, and comparisons with its results.
template <class T>
class Case {
 public:
  using floatX = T;
  Case(const Golden& golden, const std::string& name) : golden_(golden), name_(name) {}
  std::vector<int> sizes() const { return golden_.i32(name_ + "/sizes"); }
  std::vector<int> ints(const std::string& tensor) const { return golden_.i32(name_ + "/" + tensor); }
  bool has(const std::string& tensor) const { return golden_.has(name_ + "/" + tensor); }
  std::vector<float> floats(const std::string& tensor) const { return golden_.floats(name_ + "/" + tensor); }
  Guarded<floatX> in(const std::string& tensor) const { return Guarded<floatX>(floats(tensor)); }

  // units: the slack in fp32, in unit roundoffs.
  template <class Out>
  void expect(const std::string& tensor, const Guarded<Out>& actual, double units = 2) const {
    const std::vector<float> truth = golden_.f32(name_ + "/" + tensor), x = actual.floats();
    const std::vector<double> other = golden_.get<double>(name_ + "/" + tensor + ".error");
    ASSERT_EQ(x.size(), truth.size()) << name_ << "/" << tensor;
    double worst = 0, squares = 0, largest = 0;
    for (size_t i = 0; i < x.size(); i++) {
      const double off = static_cast<double>(x[i]) - truth[i];
      ASSERT_FALSE(std::isnan(off)) << name_ << "/" << tensor << "[" << i << "]";
      worst = std::max(worst, std::fabs(off));
      squares += off * off;
      largest = std::max(largest, std::fabs(static_cast<double>(truth[i])));
    }
    const double slack = largest * (sizeof(Out) == 4 ? units * 0x1p-24 : 0x1p-9);
    const double rms = std::sqrt(squares / static_cast<double>(x.size()));
    EXPECT_LE(worst, 2 * other[0] + slack) << name_ << "/" << tensor << ", largest error";
    EXPECT_LE(rms, 2 * other[1] + slack / 4) << name_ << "/" << tensor << ", rms error";
  }

 private:
  const Golden& golden_;
  std::string name_;
};

constexpr float zero = 0;

template <class T>
void encoder(const Case<T>& c, Device& device) {
  const auto sizes = c.sizes();
  const int B = sizes[0], T_ = sizes[1], C = sizes[2];
  const auto tokens = c.ints("tokens");
  const auto wte = c.in("wte"), wpe = c.in("wpe"), dout = c.in("dout");
  Guarded<T> out(dout.size()), dwpe(wpe.size(), zero);
  Guarded<float> dwte(wte.size(), zero);
  encoder_forward<T>(out, tokens.data(), wte, wpe, B, T_, C, device);
  encoder_backward<T>(dwte, dwpe, dout, tokens.data(), B, T_, C, static_cast<int>(wte.size()) / C, device);
  c.expect("out", out);
  c.expect("dwte", dwte);
  c.expect("dwpe", dwpe);
}

template <class T>
void layernorm(const Case<T>& c, Device& device) {
  const auto sizes = c.sizes();
  const int B = sizes[0], T_ = sizes[1], C = sizes[2];
  const auto inp = c.in("inp"), weight = c.in("weight"), bias = c.in("bias"), dout = c.in("dout");
  Guarded<T> out(inp.size()), dinp(inp.size(), zero), dweight(weight.size(), zero), dbias(bias.size(), zero);
  Guarded<float> mean(static_cast<size_t>(B * T_)), rstd(mean.size());
  layernorm_forward<T>(out, mean, rstd, inp, weight, bias, B, T_, C, device);
  layernorm_backward<T>(dinp, dweight, dbias, dout, inp, weight, mean, rstd, B, T_, C, device);
  c.expect("out", out);
  c.expect("mean", mean, 8);  // few values, in one case a single one: two draws of an error can lie far apart
  c.expect("rstd", rstd, 8);
  c.expect("dinp", dinp);
  c.expect("dweight", dweight);
  c.expect("dbias", dbias);
}

template <class T>
void residual_layernorm(const Case<T>& c, Device& device) {
  const auto sizes = c.sizes();
  const int B = sizes[0], T_ = sizes[1], C = sizes[2];
  const auto inp1 = c.in("inp1"), inp2 = c.in("inp2"), dout = c.in("dout");
  const auto weight = c.in("weight"), bias = c.in("bias");
  Guarded<T> out(inp1.size()), residual(inp1.size()), dweight(weight.size(), zero), dbias(bias.size(), zero);
  Guarded<float> mean(static_cast<size_t>(B * T_)), rstd(mean.size());
  residual_layernorm_forward<T>(residual, out, mean, rstd, inp1, inp2, weight, bias, B, T_, C, device);
  auto dresidual = c.in("dresidual");  // the stream's own gradient, which backward adds to
  layernorm_backward<T>(dresidual, dweight, dbias, dout, residual, weight, mean, rstd, B, T_, C, device);
  c.expect("out", out);
  c.expect("residual", residual);
  c.expect("dinp1", dresidual);
  c.expect("dweight", dweight);
  c.expect("dbias", dbias);
}

template <class T>
void matmul(const Case<T>& c, Device& device) {
  const auto sizes = c.sizes();
  const int B = sizes[0], T_ = sizes[1], C = sizes[2], OC = sizes[3];
  const auto inp = c.in("inp"), weight = c.in("weight"), dout = c.in("dout");
  const bool biased = c.has("bias");
  const Guarded<T> bias(biased ? c.floats("bias") : std::vector<float>());
  Guarded<T> out(dout.size()), dinp(inp.size()), dweight(weight.size(), zero), dbias(bias.size(), zero);
  matmul_forward<T>(out, inp, weight, biased ? bias.data() : nullptr, B, T_, C, OC, device);
  matmul_backward<T>(dinp, dweight.data(), biased ? dbias.data() : nullptr, dout, inp, weight, B, T_, C, OC, device);
  c.expect("out", out);
  c.expect("dinp", dinp);
  c.expect("dweight", dweight);
  if (biased) c.expect("dbias", dbias);
}

template <class T>
void attention(const Case<T>& c, Device& device) {
  const auto sizes = c.sizes();
  const int B = sizes[0], T_ = sizes[1], C = sizes[2], NH = sizes[3];
  const auto qkv = c.in("qkv"), dout = c.in("dout");
  Guarded<T> out(dout.size()), dqkv(qkv.size());
  Guarded<float> lse(static_cast<size_t>(B * NH * T_));
  attention_forward<T>(out, lse, qkv, B, T_, C, NH, device);
  attention_backward<T>(dqkv, dout, out, lse, qkv, B, T_, C, NH, device);
  c.expect("out", out);
  c.expect("lse", lse);
  c.expect("dqkv", dqkv, 8);  // P = exp(S - lse) is off by the roundings of S, which reaches 25 in one case
}

template <class T>
void gelu_layer(const Case<T>& c, Device& device) {
  const auto inp = c.in("inp");
  auto d = c.in("dout");
  Guarded<T> out(inp.size());
  gelu_forward<T>(out, inp, inp.size(), device);
  gelu_backward<T>(d, inp, inp.size(), device);
  c.expect("out", out);
  c.expect("dinp", d, 8);  // x s (1 - s) (1 + .134 x^2) has a cancellation in 1 - s that tanh's slope has not
}

template <class T>
void classifier(const Case<T>& c, Device& device) {
  const auto sizes = c.sizes();
  const int rows = sizes[0], V = sizes[1], Vp = sizes[2];
  const auto targets = c.ints("targets");
  const float dloss = c.floats("dlosses")[0];
  auto logits = c.in("logits");
  Guarded<float> losses(static_cast<size_t>(rows));
  fused_classifier<T>(losses, logits, targets.data(), dloss, rows, V, Vp, true, device);
  // Chunks of 256 terms: next to a term of 1 each of the 32 in the same vector lane can lose half an ulp of 1.
  c.expect("losses", losses, 2 + std::min(V, 256) / 8);
  c.expect("dlogits", logits, 2 + std::min(V, 256) / 8);
}

// Runs every case of a layer in a file; there must be at least n.
template <class T, class F>
void each_case(const std::string& layer, int n, F&& run) {
  const Golden golden(sizeof(T) == 4 ? "layers_fp32" : "layers_bf16");
  Device device;
  for (const auto& name : golden.names())
    if (name.rfind(layer + ".", 0) == 0 && name.ends_with("/sizes")) {
      run(Case<T>(golden, name.substr(0, name.find('/'))), device);
      n--;
    }
  EXPECT_LE(n, 0) << "cases of " << layer << " are missing from the golden file";
}

template <class T>
class Layers : public testing::Test {
 protected:
  static constexpr bool fp32 = sizeof(T) == 4;
};
struct Names {
  template <class T>
  static std::string GetName(int) {
    return sizeof(T) == 4 ? "fp32" : "bf16";
  }
};
using Types = testing::Types<float, bf16>;
TYPED_TEST_SUITE(Layers, Types, Names);

TYPED_TEST(Layers, Encoder) { each_case<TypeParam>("encoder", this->fp32 ? 2 : 1, encoder<TypeParam>); }
TYPED_TEST(Layers, LayerNorm) { each_case<TypeParam>("layernorm", this->fp32 ? 4 : 2, layernorm<TypeParam>); }
TYPED_TEST(Layers, ResidualLayerNorm) {
  each_case<TypeParam>("residual_layernorm", this->fp32 ? 2 : 1, residual_layernorm<TypeParam>);
}
TYPED_TEST(Layers, Matmul) { each_case<TypeParam>("matmul", this->fp32 ? 4 : 2, matmul<TypeParam>); }
TYPED_TEST(Layers, Attention) { each_case<TypeParam>("attention", this->fp32 ? 7 : 2, attention<TypeParam>); }
TYPED_TEST(Layers, Gelu) { each_case<TypeParam>("gelu", 1, gelu_layer<TypeParam>); }
TYPED_TEST(Layers, Classifier) { each_case<TypeParam>("classifier", this->fp32 ? 3 : 2, classifier<TypeParam>); }

}  // namespace
