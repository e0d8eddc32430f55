// train_gpt: trains a GPT in the precision that --precision names. Read it top to bottom:
//   the parameter table, GPT (forward, backward), what runs around it (batches, validation, samples), the training
//   loop.
// The layers are in kernels/, the arithmetic of the optimizer in mcf/.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <memory>
#include <numbers>
#include <string>
#include <vector>

#include "dataloader/batch.h"
#include "dataloader/data.h"
#include "kernels/attention.cuh"
#include "kernels/encoder.cuh"
#include "kernels/fused_classifier.cuh"
#include "kernels/gelu.cuh"
#include "kernels/global_norm.cuh"
#include "kernels/gradient_sum.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/matmul.cuh"
#include "mcf/listeners.cuh"
#include "mcf/saved.cuh"
#include "mcf/shadow.cuh"
#include "runtime/checkpoint.h"
#include "runtime/comm.h"
#include "runtime/gpu_peak.h"
#include "runtime/header.h"
#include "runtime/metrics.h"
#include "runtime/model_config.h"
#include "runtime/model_file.h"
#include "runtime/not_finite.cuh"
#include "runtime/options.h"
#include "runtime/parameter.h"
#include "runtime/plan.h"
#include "runtime/preflight.h"
#include "runtime/random.h"
#include "runtime/report.h"
#include "runtime/schedule.h"
#include "runtime/signals.h"
#include "runtime/spikes.h"
#include "runtime/terminal.h"

// ---------------------------------------------------------------------------------------------------------------------
// The parameter table: every tensor, in the order in which they lie in one flat buffer. Weights, gradients and each
// optimizer state have this layout. Names are Hugging Face's for GPT-2.

struct ParameterTable {
  std::vector<Parameter> parameters;
  std::vector<Block> blocks;        // of all tensors: what the optimizer and the norm work on
  std::vector<std::string> groups;  // that quality is told for: embeddings, h0.attn, h0.mlp, h0.norms, ..., ln_f
  std::vector<size_t> block_group;  // of each block
  size_t n_blocks = 0;              // as many, also where they are not listed
  size_t elements = 0;              // of the flat buffer, alignment and padding included
  int64_t count = 0;                // parameters of the model, without them

  // Elements of rank 0's part, where cut_blocks() cuts, but without the list of blocks.
  size_t first_part(int ranks) const {
    const size_t target = elements / static_cast<size_t>(ranks);
    for (const auto& t : parameters) {
      const size_t before = std::max(target, t.begin) - t.begin;
      const size_t cut = (before + block_elements - 1) / block_elements * block_elements;
      if (ranks > 1 && cut < t.n()) return t.begin + cut;
    }
    return elements;
  }
};

// with_blocks = false leaves out the list of blocks: 350 MB for 175 billion parameters, which a plan has no use for.
ParameterTable parameter_table(const ModelConfig& c, bool with_blocks = true) {
  ParameterTable table;
  std::string group = "embeddings";
  const auto add = [&](std::string name, int64_t rows, int64_t columns, Init init, int64_t used_rows = -1) {
    const bool matrix = init == Init::normal || init == Init::residual;
    if (used_rows < 0) used_rows = rows;
    const bool in_block = table.parameters.size() >= 2;  // after the embeddings
    table.parameters.push_back(
        {std::move(name), rows, columns, used_rows, init, matrix, matrix && in_block, table.elements});
    const size_t n = static_cast<size_t>(rows * columns);
    if (with_blocks) append_blocks(table.blocks, table.elements, n, matrix);
    const auto known = std::find(table.groups.begin(), table.groups.end(), group);
    table.block_group.resize(table.blocks.size(), static_cast<size_t>(known - table.groups.begin()));
    if (known == table.groups.end()) table.groups.push_back(group);
    table.n_blocks += (n + block_elements - 1) / block_elements;
    table.elements += (n + tensor_alignment - 1) / tensor_alignment * tensor_alignment;
    table.count += used_rows * columns;
  };
  const int64_t C = c.C;
  add("wte.weight", c.Vp, C, Init::normal, c.V);
  add("wpe.weight", c.max_T, C, Init::normal);
  for (int l = 0; l < c.L; l++) {
    const std::string h = strf("h.%d.", l);
    const auto in_group = [&](const char* part) { group = strf("h%d.%s", l, part); };
    in_group("norms");
    add(h + "ln_1.weight", C, 1, Init::ones);
    add(h + "ln_1.bias", C, 1, Init::zeros);
    in_group("attn");
    add(h + "attn.c_attn.weight", 3 * C, C, Init::normal);
    add(h + "attn.c_attn.bias", 3 * C, 1, Init::zeros);
    add(h + "attn.c_proj.weight", C, C, Init::residual);
    add(h + "attn.c_proj.bias", C, 1, Init::zeros);
    in_group("norms");
    add(h + "ln_2.weight", C, 1, Init::ones);
    add(h + "ln_2.bias", C, 1, Init::zeros);
    in_group("mlp");
    add(h + "mlp.c_fc.weight", 4 * C, C, Init::normal);
    add(h + "mlp.c_fc.bias", 4 * C, 1, Init::zeros);
    add(h + "mlp.c_proj.weight", C, 4 * C, Init::residual);
    add(h + "mlp.c_proj.bias", C, 1, Init::zeros);
  }
  group = "ln_f";
  add("ln_f.weight", C, 1, Init::ones);
  add("ln_f.bias", C, 1, Init::zeros);
  return table;
}

// A flat buffer by the tensors' short names. One instance for the weights, one for the gradients.
template <class floatX>
struct Tensors {
  floatX *wte, *wpe;  // (Vp, C), (max_T, C)
  struct Layer {
    floatX *ln1w, *ln1b;          // (C)
    floatX *qkvw, *qkvb;          // (3C, C), (3C)
    floatX *attprojw, *attprojb;  // (C, C), (C)
    floatX *ln2w, *ln2b;          // (C)
    floatX *fcw, *fcb;            // (4C, C), (4C)
    floatX *fcprojw, *fcprojb;    // (C, 4C), (C)
  };
  std::vector<Layer> layers;
  floatX *lnfw, *lnfb;  // (C)

  Tensors(floatX* base, const ParameterTable& table, int L) : layers(static_cast<size_t>(L)) {
    size_t i = 0;
    const auto next = [&] { return base + table.parameters[i++].begin; };
    wte = next(), wpe = next();
    for (auto& l : layers) {
      l.ln1w = next(), l.ln1b = next(), l.qkvw = next(), l.qkvb = next(), l.attprojw = next(), l.attprojb = next();
      l.ln2w = next(), l.ln2b = next(), l.fcw = next(), l.fcb = next(), l.fcprojw = next(), l.fcprojb = next();
    }
    lnfw = next(), lnfb = next();
  }
};

// The initial weights, rounded to bf16 whatever the precision, so that runs differ in arithmetic only. Each element is
// a function of (seed, tensor, element).
template <class floatX>
void initialize(floatX* params, const ParameterTable& table, int L, uint64_t seed, Device& device) {
  std::vector<floatX> values;
  for (size_t p = 0; p < table.parameters.size(); p++) {
    const Parameter& t = table.parameters[p];
    if (t.init == Init::zeros) continue;  // the device's memory starts at zero
    values.resize(static_cast<size_t>(t.used_rows * t.columns));
    const double std = t.init == Init::residual ? 0.02 / std::sqrt(2.0 * L) : 0.02;
#pragma omp parallel for
    for (size_t i = 0; i < values.size(); i += 2) {  // Box and Muller (1958): two normal numbers from two uniform ones
      const double radius = std * std::sqrt(-2.0 * std::log(1.0 - random_uniform(seed, p, i, 0)));
      const double angle = 2.0 * std::numbers::pi * random_uniform(seed, p, i, 1);
      const bool ones = t.init == Init::ones;
      store(values[i], ones ? 1.0f : rn(static_cast<float>(radius * std::cos(angle))));
      if (i + 1 < values.size()) store(values[i + 1], ones ? 1.0f : rn(static_cast<float>(radius * std::sin(angle))));
    }
    device.upload(params + t.begin, values.data(), values.size());
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// GPT-2: learned positions, LayerNorm before attention and MLP, tanh GELU, output projection tied to the embedding.

// Hands out pieces of one allocation. Run on nothing it only adds up: the memory plan and the allocation are one code.
class Layout {
 public:
  explicit Layout(char* base = nullptr) : base_(base) {}
  template <class E>
  void operator()(E*& pointer, size_t n) {
    pointer = base_ ? reinterpret_cast<E*>(base_ + bytes_) : nullptr;
    bytes_ += (n * sizeof(E) + 63) / 64 * 64;
  }
  size_t bytes() const { return bytes_; }

 private:
  char* base_;
  size_t bytes_ = 0;
};

// What backward computes again instead of keeping it: each level includes those before it. The same operations on the
// same stored values, so never other bits.
enum class Recompute { none, gelu, layernorm, block };

Recompute recompute_level(const std::string& name) {
  return name == "none"        ? Recompute::none
         : name == "gelu"      ? Recompute::gelu
         : name == "layernorm" ? Recompute::layernorm
                               : Recompute::block;
}

// What forward leaves for backward. What is computed again exists once, and all layers point to it.
template <class floatX>
struct Activations {
  floatX* encoded;  // (B,T,C)
  struct Layer {
    floatX* ln1;                 // (B,T,C)
    float *ln1_mean, *ln1_rstd;  // (B,T)
    floatX* qkv;                 // (B,T,3C)
    float* lse;                  // (B,NH,T) log-sum-exp of the scores
    floatX* atty;                // (B,T,C)
    floatX* residual2;           // (B,T,C)
    floatX* ln2;                 // (B,T,C)
    float *ln2_mean, *ln2_rstd;  // (B,T)
    floatX* fch;                 // (B,T,4C) before GELU
    floatX* fch_gelu;            // (B,T,4C)
    floatX* residual3;           // (B,T,C)
  };
  std::vector<Layer> layers;
  floatX* lnf;                 // (B,T,C)
  float *lnf_mean, *lnf_rstd;  // (B,T)
  float* losses;               // (B,T)

  void lay_out(Layout& layout, const ModelConfig& c, int B, int T, Recompute recompute) {
    const size_t BT = static_cast<size_t>(B) * T, BTC = BT * c.C;
    layers.resize(static_cast<size_t>(c.L));
    Layer& first = layers[0];
    layout(encoded, BTC);
    for (auto& l : layers) {
      // Of its own for this layer, or the first layer's.
      const auto place = [&](Recompute level, auto Layer::*field, size_t n) {
        if (recompute < level || &l == &first)
          layout(l.*field, n);
        else
          l.*field = first.*field;
      };
      place(Recompute::layernorm, &Layer::ln1, BTC), place(Recompute::layernorm, &Layer::ln2, BTC);
      place(Recompute::gelu, &Layer::fch_gelu, 4 * BTC);
      for (const auto field : {&Layer::ln1_mean, &Layer::ln1_rstd, &Layer::ln2_mean, &Layer::ln2_rstd})
        place(Recompute::block, field, BT);
      place(Recompute::block, &Layer::qkv, 3 * BTC), place(Recompute::block, &Layer::lse, BT * c.NH);
      place(Recompute::block, &Layer::atty, BTC), place(Recompute::block, &Layer::residual2, BTC);
      place(Recompute::block, &Layer::fch, 4 * BTC);
      layout(l.residual3, BTC);
    }
    layout(lnf, BTC), layout(lnf_mean, BT), layout(lnf_rstd, BT), layout(losses, BT);
  }
};

// What is used and forgotten within a step.
template <class floatX>
struct Workspace {
  int chunk_rows;         // rows of logits that exist at a time
  floatX* logits;         // (chunk_rows, Vp)
  floatX* projected;      // (B,T,C) output of a projection, before it joins the residual
  floatX* dresidual;      // (B,T,C) gradient of the residual stream
  floatX* dbtc;           // (B,T,C)
  floatX* dbt4c;          // (B,T,4C)
  float* dwte;            // (Vp,C) gradient of the tied embedding: both contributions, before it is rounded
  int *tokens, *targets;  // (B,T)
  double* loss_sums;      // (max_loss_sums) of the forward passes since they were last fetched
  static constexpr size_t max_loss_sums = 1024;

  void lay_out(Layout& layout, const ModelConfig& c, int B, int T, Recompute) {
    const size_t BT = static_cast<size_t>(B) * T, BTC = BT * c.C;
    chunk_rows = std::min(B * T, std::max(256, (1 << 24) / c.Vp / 256 * 256));  // about 32 MiB of bf16
    layout(logits, static_cast<size_t>(chunk_rows) * c.Vp), layout(projected, BTC), layout(dresidual, BTC);
    layout(dbtc, BTC), layout(dbt4c, 4 * BTC), layout(dwte, static_cast<size_t>(c.Vp) * c.C);
    layout(tokens, BT), layout(targets, BT), layout(loss_sums, max_loss_sums);
  }
};

template <class floatX>
class GPT {
 public:
  const ModelConfig config;
  const ParameterTable table;
  const BlockList blocks;

  // Room for micro-batches of up to (B,T) tokens. seed: of the initial weights; without one they are left 0.
  GPT(const ModelConfig& c, int B, int T, Recompute recompute, std::optional<uint64_t> seed, Device& device)
      : config(c),
        table(parameter_table(c)),
        blocks(table.blocks, device),
        recompute_(recompute),
        device_(device),
        params_(device, Memory::weights, table.elements),
        grads_(device, Memory::gradients, table.elements),
        w_(params_, table, c.L),
        dw_(grads_, table, c.L) {
    activation_memory_ = lay_out(acts_, Memory::activations, B, T);
    work_memory_ = lay_out(work_, Memory::workspace, B, T);
    if (seed) initialize(params_.data(), table, c.L, *seed, device);
  }

  floatX* params() { return params_; }
  floatX* grads() { return grads_; }
  void zero_gradients() {
    Scope scope("zero_gradients", device_);
    device_.zero(grads_.data(), grads_.size());
  }

  // Runs the blocks on tokens (B,T), host memory, up to the last LayerNorm.
  void forward(const int* tokens, int B, int T) {
    const int C = config.C;
    auto& a = acts_;
    device_.upload(work_.tokens, tokens, static_cast<size_t>(B) * T);
    encoder_forward(a.encoded, work_.tokens, w_.wte, w_.wpe, B, T, C, device_);
    recompute_ln1(0, B, T);
    for (int i = 0; i < config.L; i++) {
      auto& l = a.layers[static_cast<size_t>(i)];
      forward_block(i, B, T);
      matmul_forward(work_.projected, l.fch_gelu, w(i).fcprojw, w(i).fcprojb, B, T, 4 * C, C, device_);
      // The addition that ends this block and the LayerNorm that starts the next are one pass.
      if (i + 1 < config.L) {
        auto& next = a.layers[static_cast<size_t>(i) + 1];
        residual_layernorm_forward(l.residual3, next.ln1, next.ln1_mean, next.ln1_rstd, l.residual2, work_.projected,
                                   w(i + 1).ln1w, w(i + 1).ln1b, B, T, C, device_);
      } else {
        residual_layernorm_forward(l.residual3, a.lnf, a.lnf_mean, a.lnf_rstd, l.residual2, work_.projected, w_.lnfw,
                                   w_.lnfb, B, T, C, device_);
      }
    }
  }

  // Computes the losses of the last forward, in nats, for take_losses(). targets (B,T), host memory.
  void loss(const int* targets, int B, int T) { classify(targets, B, T, 0.0f, false); }

  // The same, and adds to the gradients those of loss_scale * (sum of the losses). Calls ready(begin, end) as soon as
  // the gradients of these elements of the flat buffer are complete: the last LayerNorm's, then block after block from
  // the last, then the embeddings'.
  template <class Ready>
  void loss_and_backward(const int* tokens, const int* targets, float loss_scale, int B, int T, Ready&& ready) {
    const int C = config.C, NH = config.NH;
    const size_t BT = static_cast<size_t>(B) * T;
    auto& a = acts_;
    floatX *dresidual = work_.dresidual, *dbtc = work_.dbtc, *dbt4c = work_.dbt4c;
    {
      Scope scope("zero_scratch", device_);
      device_.zero(work_.dwte, static_cast<size_t>(config.Vp) * C);
      device_.zero(dresidual, BT * C);
    }
    classify(targets, B, T, loss_scale, true);  // leaves the gradient of lnf in dbtc
    layernorm_backward(dresidual, dw_.lnfw, dw_.lnfb, dbtc, a.layers.back().residual3, w_.lnfw, a.lnf_mean, a.lnf_rstd,
                       B, T, C, device_);
    // From the first tensor of block i (or what follows the last) to that of the next.
    const auto begin_of = [&](int i) { return table.parameters[2 + 12 * static_cast<size_t>(i)].begin; };
    ready(begin_of(config.L), table.elements);
    for (int i = config.L - 1; i >= 0; i--) {
      const auto& dw = dw_.layers[static_cast<size_t>(i)];
      const auto& l = a.layers[static_cast<size_t>(i)];
      if (recompute_ == Recompute::block) {
        recompute_ln1(i, B, T);
        forward_block(i, B, T);
      } else if (recompute_ >= Recompute::gelu) {
        gelu_forward(l.fch_gelu, l.fch, BT * 4 * C, device_);
      }
      matmul_backward(dbt4c, dw.fcprojw, dw.fcprojb, dresidual, l.fch_gelu, w(i).fcprojw, B, T, 4 * C, C, device_);
      gelu_backward(dbt4c, l.fch, BT * 4 * C, device_);
      if (recompute_ == Recompute::layernorm)
        layernorm_forward(l.ln2, l.ln2_mean, l.ln2_rstd, l.residual2, w(i).ln2w, w(i).ln2b, B, T, C, device_);
      matmul_backward(dbtc, dw.fcw, dw.fcb, dbt4c, l.ln2, w(i).fcw, B, T, C, 4 * C, device_);
      layernorm_backward(dresidual, dw.ln2w, dw.ln2b, dbtc, l.residual2, w(i).ln2w, l.ln2_mean, l.ln2_rstd, B, T, C,
                         device_);
      matmul_backward(dbtc, dw.attprojw, dw.attprojb, dresidual, l.atty, w(i).attprojw, B, T, C, C, device_);
      floatX* dqkv = dbt4c;
      attention_backward(dqkv, dbtc, l.atty, l.lse, l.qkv, B, T, C, NH, device_);
      if (recompute_ == Recompute::layernorm) recompute_ln1(i, B, T);
      matmul_backward(dbtc, dw.qkvw, dw.qkvb, dqkv, l.ln1, w(i).qkvw, B, T, C, 3 * C, device_);
      layernorm_backward(dresidual, dw.ln1w, dw.ln1b, dbtc, residual_before(i), w(i).ln1w, l.ln1_mean, l.ln1_rstd, B, T,
                         C, device_);
      ready(begin_of(i), begin_of(i + 1));
    }
    encoder_backward(work_.dwte, dw_.wpe, dresidual, tokens, B, T, C, config.V, device_);
    add_embedding_gradient(dw_.wte, work_.dwte, static_cast<size_t>(config.Vp) * C, device_);
    ready(0, begin_of(0));
  }

  // The sum of the losses of each forward pass since the last call. Waits for the device.
  std::vector<double> take_losses() {
    fetch_losses();
    return std::exchange(fetched_losses_, {});
  }

  // Logits (V) that follow token t of the last forward of one sequence.
  std::vector<floatX> logits(int t) {
    matmul_forward(work_.logits, acts_.lnf + static_cast<size_t>(t) * config.C, w_.wte,
                   static_cast<const floatX*>(nullptr), 1, 1, config.C, config.Vp, device_);
    std::vector<floatX> logits(static_cast<size_t>(config.V));
    device_.download(logits.data(), work_.logits, logits.size());
    return logits;
  }

 private:
  template <class Pointers>
  Buffer<char> lay_out(Pointers& pointers, Memory memory, int B, int T) {
    Layout plan;
    pointers.lay_out(plan, config, B, T, recompute_);
    Buffer<char> buffer(device_, memory, plan.bytes());
    Layout layout(buffer);
    pointers.lay_out(layout, config, B, T, recompute_);
    return buffer;
  }

  const typename Tensors<floatX>::Layer& w(int i) const { return w_.layers[static_cast<size_t>(i)]; }
  const floatX* residual_before(int i) const {
    return i == 0 ? acts_.encoded : acts_.layers[static_cast<size_t>(i) - 1].residual3;
  }

  void recompute_ln1(int i, int B, int T) {
    auto& l = acts_.layers[static_cast<size_t>(i)];
    layernorm_forward(l.ln1, l.ln1_mean, l.ln1_rstd, residual_before(i), w(i).ln1w, w(i).ln1b, B, T, config.C, device_);
  }

  // Block i from ln1 up to the GELU: what backward needs again where nothing of it is kept.
  void forward_block(int i, int B, int T) {
    const int C = config.C;
    auto& l = acts_.layers[static_cast<size_t>(i)];
    matmul_forward(l.qkv, l.ln1, w(i).qkvw, w(i).qkvb, B, T, C, 3 * C, device_);
    attention_forward(l.atty, l.lse, l.qkv, B, T, C, config.NH, device_);
    matmul_forward(work_.projected, l.atty, w(i).attprojw, w(i).attprojb, B, T, C, C, device_);
    residual_layernorm_forward(l.residual2, l.ln2, l.ln2_mean, l.ln2_rstd, residual_before(i), work_.projected,
                               w(i).ln2w, w(i).ln2b, B, T, C, device_);
    matmul_forward(l.fch, l.ln2, w(i).fcw, w(i).fcb, B, T, C, 4 * C, device_);
    gelu_forward(l.fch_gelu, l.fch, static_cast<size_t>(B) * T * 4 * C, device_);
  }

  // The output projection and the loss, in chunks of rows: the logits of a whole batch would be the largest tensor by
  // far.
  void classify(const int* targets, int B, int T, float loss_scale, bool backward) {
    const int C = config.C, V = config.V, Vp = config.Vp, rows = B * T;
    constexpr floatX* no_bias = nullptr;
    device_.upload(work_.targets, targets, static_cast<size_t>(rows));
    for (int r = 0; r < rows; r += work_.chunk_rows) {
      const int n = std::min(work_.chunk_rows, rows - r);
      const floatX* lnf = acts_.lnf + static_cast<size_t>(r) * C;
      matmul_forward(work_.logits, lnf, w_.wte, no_bias, 1, n, C, Vp, device_);
      fused_classifier(acts_.losses + r, work_.logits, work_.targets + r, loss_scale, n, V, Vp, backward, device_);
      if (backward)
        matmul_backward(work_.dbtc + static_cast<size_t>(r) * C, work_.dwte, no_bias, work_.logits, lnf, w_.wte, 1, n,
                        C, Vp, device_);
    }
    add_losses(work_.loss_sums + losses_++, acts_.losses, rows, device_);
    if (losses_ == work_.max_loss_sums) fetch_losses();
  }

  void fetch_losses() {
    const size_t before = fetched_losses_.size();
    fetched_losses_.resize(before + losses_);
    device_.download(fetched_losses_.data() + before, work_.loss_sums, losses_);
    device_.zero(work_.loss_sums, losses_);
    losses_ = 0;
  }

  const Recompute recompute_;
  Device& device_;
  Buffer<floatX> params_, grads_;
  Tensors<floatX> w_, dw_;
  Activations<floatX> acts_;
  Workspace<floatX> work_;
  Buffer<char> activation_memory_, work_memory_;
  size_t losses_ = 0;  // sums on the device
  std::vector<double> fetched_losses_;
};

// ---------------------------------------------------------------------------------------------------------------------
// Around the model: batches, validation, samples.

// n things shared out over the ranks: rank r takes those from [r] to [r + 1].
std::vector<size_t> shares(int64_t n, int ranks) {
  std::vector<size_t> first;
  for (int r = 0; r <= ranks; r++) first.push_back(static_cast<size_t>(n * r / ranks));
  return first;
}

// The sum of the losses of all ranks' forward passes since the last call, in the order of the stream, whoever made
// them: the same bits for every number of ranks. Rank r made those from first[r] to first[r + 1]. Waits for the device.
template <class floatX>
double sum_of_losses(GPT<floatX>& model, Comm& comm, const std::vector<size_t>& first) {
  std::vector<double> losses(first.back());
  const std::vector<double> mine = model.take_losses();
  std::copy(mine.begin(), mine.end(), losses.begin() + static_cast<int64_t>(first[static_cast<size_t>(comm.rank())]));
  comm.share(losses.data(), first);
  double sum = 0;
  for (const double loss : losses) sum += loss;
  return sum;
}

// Mean loss over the first sequences of the validation set, in file order; every token counts the same, whatever B is.
// The ranks share the batches, and the losses are added in file order: the same bits for every number of ranks.
template <class floatX>
double validate(GPT<floatX>& model, Dataset& data, const Options& o, Comm& comm) {
  const int64_t sequences = o.val_sequences ? std::min(o.val_sequences, data.sequences()) : data.sequences();
  Batch batch(o.batch_size, o.seq_len);
  const std::vector<size_t> first = shares((sequences + batch.B - 1) / batch.B, comm.ranks());
  for (size_t n = first[static_cast<size_t>(comm.rank())]; n < first[static_cast<size_t>(comm.rank()) + 1]; n++) {
    const int64_t i = static_cast<int64_t>(n) * batch.B;
    const int rows = static_cast<int>(std::min<int64_t>(batch.B, sequences - i));
    for (int b = 0; b < rows; b++) batch.fill_row(b, [&](int32_t* out) { data.read(i + b, out); });
    model.forward(batch.tokens.data(), rows, batch.T);
    model.loss(batch.targets.data(), rows, batch.T);
  }
  return sum_of_losses(model, comm, first) / static_cast<double>(sequences * batch.T);
}

// Continues the prompt by --sample-tokens tokens drawn from the model's distribution. Beyond T the model sees the last
// T.
template <class floatX>
std::vector<int32_t> sample(GPT<floatX>& model, std::vector<int32_t> tokens, const Options& o, int64_t step) {
  const size_t prompt = tokens.size(), T = static_cast<size_t>(o.seq_len);
  while (tokens.size() < prompt + static_cast<size_t>(o.sample_tokens)) {
    const size_t seen = std::min(tokens.size(), T);
    // What comes after a token does not change it, so the length is rounded up: few shapes, few primitives to create.
    std::vector<int> window(std::min(T, (seen + 63) / 64 * 64), 0);
    std::copy(tokens.end() - static_cast<int64_t>(seen), tokens.end(), window.begin());
    model.forward(window.data(), 1, static_cast<int>(window.size()));
    const auto logits = model.logits(static_cast<int>(seen) - 1);
    double max = -HUGE_VAL, sum = 0, chosen = 0;
    for (const floatX logit : logits) max = std::max(max, static_cast<double>(to_float(logit)));
    for (const floatX logit : logits) sum += std::exp(to_float(logit) - max);
    const double coin = random_uniform(o.seed, ~uint64_t{0}, static_cast<uint64_t>(step), tokens.size()) * sum;
    int32_t token = 0;
    while (token < model.config.V - 1 &&
           (chosen += std::exp(to_float(logits[static_cast<size_t>(token)]) - max)) <= coin)
      token++;
    tokens.push_back(token);
  }
  return tokens;
}

// ---------------------------------------------------------------------------------------------------------------------
// The run.

// What the kernels of a GPU ask Device::scratch for, at most: its slots 0 and 1, and cuBLASLt's.
int64_t kernel_scratch_bytes(const ModelConfig& c, int B, int T, size_t n_blocks) {
  const int BT = B * T;
  const size_t floats = std::max({static_cast<size_t>(BT) * c.NH, layernorm_backward_scratch(BT, c.C),
                                  bias_backward_scratch(BT, 4 * c.C), TokenBuckets::ints(BT), 2 * n_blocks});
  return static_cast<int64_t>((floats + encoder_backward_scratch(B, T, c.C)) * sizeof(float)) + (int64_t{32} << 20);
}

// What rank 0 of a run allocates; the parts of other ranks are larger by a block at most. All that asks for memory
// before it is allocated asks here. The list of blocks is not needed.
MemoryPlanner memory_planner(const ModelConfig& c, ParameterTable table, int ranks) {
  return [&c, table = std::move(table), ranks](const Options& o, const PrecisionBytes& precision) {
    const auto layout_bytes = [&]<class Pointers>(Pointers pointers) {
      Layout layout;
      pointers.lay_out(layout, c, o.batch_size, o.seq_len, recompute_level(o.recompute));
      return static_cast<int64_t>(layout.bytes());
    };
    const bool in_bf16 = precision.weight == sizeof(bf16);
    const int64_t blocks = static_cast<int64_t>(table.n_blocks);
    MemoryPlan plan;
    plan[Memory::weights] = plan[Memory::gradients] = static_cast<int64_t>(table.elements) * precision.weight;
    plan[Memory::activations] = in_bf16 ? layout_bytes(Activations<bf16>()) : layout_bytes(Activations<float>());
    plan[Memory::workspace] = in_bf16 ? layout_bytes(Workspace<bf16>()) : layout_bytes(Workspace<float>());
    plan[Memory::workspace] += blocks * static_cast<int64_t>(sizeof(Block));
    constexpr int64_t pages = int64_t{32} << 20;  // a page of 2 MiB lost to each of some 12 allocations
    plan.later = kernel_scratch_bytes(c, o.batch_size, o.seq_len, table.n_blocks) + pages;
    if (!o.eval_only) {  // the optimizers'
      const int64_t part = static_cast<int64_t>(table.first_part(o.zero ? ranks : 1));
      const auto add_optimizer = [&](int states) {
        plan[Memory::states] += part * states;
        plan[Memory::workspace] += blocks * static_cast<int64_t>(sizeof(QualitySums)) + sizeof(AdamWStep);
      };
      add_optimizer(precision.states);
      for (const PrecisionName& name : lockstep_names(o))
        with_strategy(name.precision, name.mode, [&]<class S>() {
          add_optimizer(precision_bytes<S>().states);
          plan[Memory::states] += static_cast<int64_t>(table.elements * sizeof(typename S::Theta));  // its own weights
        });
      if (o.total_batch_tokens > int64_t{o.batch_size} * o.seq_len * ranks && in_bf16)
        plan[Memory::gradients] += static_cast<int64_t>(table.elements) * GradientSum::bytes(o.grad_accum);
      if (o.shadow > 0)  // a place and a weight each, as many as a hash takes on average
        plan.later += part / o.shadow * static_cast<int64_t>(sizeof(size_t) + static_cast<size_t>(precision.weight));
      if (const size_t colon = o.switch_precision.find(':');
          colon != std::string::npos) {  // for a moment both are there
        const PrecisionName to = parse_precision("switch", o.switch_precision.substr(colon + 1), o.mcf);
        with_strategy(to.precision, to.mode, [&]<class S>() { plan.later += part * precision_bytes<S>().states; });
      }
    }
    return plan;
  };
}

// Completes --total-batch-tokens: micro-batches of B x T tokens, as many on every rank, make it up.
void complete_batch(Options& o, int ranks) {
  const int B = o.batch_size, T = o.seq_len;
  const int64_t all_ranks_tokens = static_cast<int64_t>(B) * T * ranks;
  if (o.total_batch_tokens == 0) o.total_batch_tokens = all_ranks_tokens;
  if (o.total_batch_tokens % all_ranks_tokens)
    USAGE_ERROR(
        "--total-batch-tokens: %lld is no multiple of batch-size x seq-len%s = %d x %d%s = %lld; try %lld, or a "
        "smaller --batch-size",
        static_cast<long long>(o.total_batch_tokens), ranks > 1 ? " x ranks" : "", B, T,
        ranks > 1 ? strf(" x %d", ranks).c_str() : "", static_cast<long long>(all_ranks_tokens),
        static_cast<long long>((o.total_batch_tokens / all_ranks_tokens + 1) * all_ranks_tokens));
}

// --plan, for so many ranks. Allocates nothing.
void print_plan(Options o, int ranks) {
  if (o.model.empty()) o.model = o.device == "cpu" ? "d6" : "d12";
  const std::optional<ModelFile> file = model_file(o);
  o.seq_len = model_config(o, 0, file).max_T;
  complete_batch(o, ranks);
  const ModelConfig config = model_config(o, 0, file);
  const ParameterTable table = parameter_table(config, false);
  const Plan plan = make_plan(o, config, table.count, static_cast<int64_t>(table.first_part(o.zero ? ranks : 1)), ranks,
                              memory_planner(config, table, ranks));
  const std::string warnings = preflight_text(o);
  printf("%s%s%s", plan_text(plan).c_str(), warnings.empty() ? "" : "\n", warnings.c_str());
}

template <class floatX>
void train(Options o, const ModelConfig& config, const std::optional<ModelFile>& file, Data& data,
           const Resumed& resumed, const PrecisionName& now_in, const std::string& command,
           const PrecisionBytes& precision, const char* meaning, const std::string& why_no_gpu, Device& device,
           Comm& comm) {
  const auto now = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  };
  const int B = o.batch_size, T = o.seq_len;

  // Every rank takes as many micro-batches, the first rank the first in the stream of sequences.
  complete_batch(o, comm.ranks());
  const int64_t step_micro_batches = o.total_batch_tokens / B / T, step_sequences = step_micro_batches * B;
  const int64_t micro_batches = step_micro_batches / comm.ranks(), first_micro_batch = micro_batches * comm.rank();
  if (!o.eval_only && o.steps == 0) {
    o.steps = data.train->sequences() / step_sequences;
    if (o.steps == 0)
      USAGE_ERROR(
          "--steps: one epoch is %lld sequences, less than the %lld of one step; give --steps or a smaller batch",
          static_cast<long long>(data.train->sequences()), static_cast<long long>(step_sequences));
  }
  const RunState from = resumed.checkpoint ? resumed.checkpoint->state : RunState();
  const std::string trained_on = o.eval_only ? "" : data.train->identity();
  if (resumed.checkpoint && trained_on != from.data)
    USAGE_ERROR("--train-data: found %s, the checkpoint was trained on %s; expected the same shards, wherever they are",
                trained_on.c_str(), in_quotes(from.data).c_str());
  if (from.step >= o.steps && from.step > 0) {
    Checkpoints(o.out, o.keep_checkpoints, true, comm);  // removes what a killed run had begun
    printf("nothing left to do: %s of %s steps are done; more with --steps\n", human_count(from.step).c_str(),
           human_count(o.steps).c_str());
    return;
  }
  if (resumed.checkpoint) require_whole(*resumed.checkpoint, config, comm);
  if (o.edq_every < 0) o.edq_every = device.is_cuda() ? 10 : 1;
  if (o.shadow < 0) o.shadow = o.lockstep.empty() ? 0 : 1024;
  if (o.edq_every == 0 && (o.shadow || !o.lockstep.empty()))
    USAGE_ERROR("--%s: needs --edq-every, which is 0: nothing of it would be written",
                o.lockstep.empty() ? "shadow" : "lockstep");
  if (sizeof(floatX) == 4 && o.grad_accum != "bf16")
    USAGE_ERROR("--grad-accum: found %s with --precision=fp32, whose gradients are fp32; leave it out",
                o.grad_accum.c_str());
  const Switch to = parse_switch<floatX>(o);
  const std::vector<int32_t> prompt = prompt_tokens(o, data, config.V);

  const double start = now();
  if (device.is_cuda())
    require_memory(o, precision, memory_planner(config, parameter_table(config, false), comm.ranks()),
                   device.free_bytes());
  const bool random_weights = !file && !resumed.checkpoint;
  GPT<floatX> model(config, B, T, recompute_level(o.recompute), random_weights ? std::optional(o.seed) : std::nullopt,
                    device);
  if (file)
    comm.require_same("weights",
                      strf("%08x (CRC-32)", load_weights(model.params(), *file, model.table.parameters, device)));
  const Cut cut = cut_blocks(model.table.blocks, model.table.elements, comm.ranks());
  const Part part = o.zero ? cut.part(comm.rank()) : Part(model.table.elements);
  std::vector<Listener<floatX>> listeners;
  if (!o.eval_only)
    listeners = make_listeners(o, now_in, model.params(), model.table.elements, model.blocks, part, device);
  GradientSum gradient_sum(micro_batches > 1 && !o.eval_only ? o.grad_accum : "bf16", model.table.elements, device);
  std::array<int64_t, memory_names.size()> allocated;  // what the plan says; kernels ask for scratch as they first run
  for (size_t m = 0; m < allocated.size(); m++) allocated[m] = device.bytes(static_cast<Memory>(m));
  Shadow<floatX> shadow(o.eval_only ? 0 : o.shadow, model.params(), model.blocks, part, device);
  const double peak = comm.sum(device.is_cuda() ? gpu_peak_flops(device.properties().name, sizeof(floatX) == 2)
                                                : measured_product_peak(sizeof(floatX) == 2, device));  // of all ranks
  const std::vector<std::string> devices = comm.list_devices(
      device.id(), device.is_cuda() ? device.properties().name
                                    : strf("CPU, %d thread%s", device.threads(), device.threads() == 1 ? "" : "s"));
  if (device.is_cuda() && comm.ranks() > 1) comm.use_gpu(device.stream());
  const double step_flops = 6.0 * static_cast<double>(model.table.count) * static_cast<double>(o.total_batch_tokens);

  std::string rounded;  // lines
  if (resumed.checkpoint) {
    rounded = restore_run(*resumed.checkpoint, resumed.stored, model.params(), listeners, shadow,
                          model.table.parameters, part, device, comm);
    if (o.zero) comm.all_gather(model.params(), cut.elements), comm.wait();
  }
  // Where every rank has all states, the first saves them.
  const Part saved_part = o.zero || comm.rank() == 0 ? part : Part(0, 0, 0, 0);
  SavedRun<floatX> saved(model.params(), model.table.elements, listeners, shadow, model.table.parameters, saved_part,
                         comm.rank() == 0);
  if (o.checkpoint_every) saved.reserve();

  Metrics metrics(comm.rank() == 0 ? o.out : "", from.step);
  Checkpoints checkpoints(o.eval_only ? "" : o.out, o.keep_checkpoints, from.step > 0, comm);
  Report report(metrics.path());
  std::vector<std::string> output;
  if (!o.out.empty()) output = {metrics.path(), report.path() + ", for a browser"};
  for (const auto& path : {metrics.moved_to(), checkpoints.moved_to()})
    if (!path.empty()) output.push_back("an earlier run's are now in " + path);
  if (o.checkpoint_every)
    output.push_back(strf("a checkpoint every %s steps, %s kept; its copy takes %s of memory",
                          human_count(o.checkpoint_every).c_str(),
                          o.keep_checkpoints ? human_count(o.keep_checkpoints).c_str() : "all",
                          human_bytes(static_cast<double>(saved.bytes())).c_str()));
  print_header({o, config, file, data, device, comm, devices, why_no_gpu, peak, model.table.count,
                strf("%s%s: %s, %d bytes a parameter with its gradient", now_in.precision.c_str(),
                     now_in.mode == "strict" ? "" : (" " + now_in.mode).c_str(), meaning, precision.total()),
                sizeof(floatX) == 2, step_sequences, allocated, output, resumed.lines(o, now_in, rounded),
                now() - start});

  Record run;
  run.add("command", command).add("version", version()).add("precision", o.precision);
  run.add("device", device.is_cuda() ? device.properties().name : "cpu").add("ranks", comm.ranks());
  run.add("threads", device.threads()).add("isa", product_library()).add("flags", flag_values(o));
  Record memory;
  for (size_t m = 0; m < memory_names.size(); m++) memory.add(memory_names[m], allocated[m]);
  run.add("parameters", model.table.count).add("bytes_per_param", precision.total()).add("memory", memory);
  if (metrics.empty()) metrics.write(run);

  const auto print_sample = [&](int64_t step) {
    const std::vector<int32_t> tokens = sample(model, prompt, o, step);
    std::string text;
    for (const int32_t token : tokens)
      text += data.tokenizer ? std::string(data.tokenizer->decode(token)) : strf("%d ", token);
    printf("%s\n", wrapped(text, 110).c_str());
  };
  if (o.eval_only) {
    const double val_loss = validate(model, *data.val, o, comm);
    printf("%s\n", val_line(0, 0, val_loss).c_str());
    metrics.write(Record().add("step", 0).add("val_loss", val_loss));
    report.update();
    if (o.sample_every && comm.rank() == 0) print_sample(0);
    return;
  }

  // The training loop.
  Terminal terminal;
  Batch batch(B, T);
  Buffer<double> grad_norm(device, Memory::workspace, 1);  // on the device
  Stopwatch optimizer_watch(device);
  int64_t updates = from.updates, saved_step = -1;
  int64_t bad_in_a_row =
      from.bad_steps_in_a_row < o.max_bad_steps ? from.bad_steps_in_a_row : 0;  // it stopped for them
  SpikeWindow losses(from.losses), grad_norms(from.grad_norms);
  // Copies the state after so many steps, for start_checkpoint(). Returns ms that training stood still.
  const auto copy_state = [&] {
    const double begun = now();
    checkpoints.finish();
    saved.copy(device);
    return (now() - begun) * 1e3;
  };
  const auto start_checkpoint = [&](int64_t step) {
    RunState s{step,
               updates,
               listeners[0].precision.precision,
               listeners[0].precision.mode,
               trained_on,
               bad_in_a_row,
               losses.values(),
               grad_norms.values(),
               flag_texts(o)};
    checkpoints.start(s, saved.model,
                      config_json(config, sizeof(floatX) == 2 ? "bfloat16" : "float32", data.eot(config.V)),
                      o.zero || comm.rank() == 0 ? std::optional(saved.optimizer) : std::nullopt);
    saved_step = step;
  };
  watch_signals();
  Signals asked;
  bool give_up = false;
  int64_t step = from.step;
  for (; step < o.steps && !asked.stop && !give_up; step++) {
    const double step_start = now();
    if (step == to.step) {
      const std::string line = switch_precision(listeners[0], to.to, model.blocks, part, device, comm);
      printf("switch after step %lld: %s\n", static_cast<long long>(step), line.c_str());
      if (o.zero) comm.all_gather(model.params(), cut.elements), comm.wait();
    }
    model.zero_gradients();
    for (int64_t micro = first_micro_batch; micro < first_micro_batch + micro_batches; micro++) {
      const int64_t first = (o.overfit_batch ? 0 : step * step_sequences) + micro * B;
      for (int b = 0; b < B; b++)
        batch.fill_row(b, [&](int32_t* out) { data.train->read_shuffled(first + b, o.seed, out); });
      model.forward(batch.tokens.data(), B, T);
      // In the last micro-batch gradients go to their owners while backward goes on.
      const bool last = micro + 1 == first_micro_batch + micro_batches;
      model.loss_and_backward(batch.tokens.data(), batch.targets.data(),
                              1.0f / static_cast<float>(o.total_batch_tokens), B, T, [&](size_t begin, size_t end) {
                                if (gradient_sum.active()) gradient_sum.add(model.grads(), begin, end, last, device);
                                if (last) comm.reduce_scatter(model.grads(), begin, end, cut);
                              });
    }
    if (!o.zero) comm.all_gather(model.grads(), cut.elements);
    comm.wait();
    global_norm(
        grad_norm.data(), model.grads(), model.blocks, part,
        [&](double* partial) {
          if (o.zero) comm.all_gather(partial, cut.blocks);
          comm.wait();
        },
        device);

    // Everything is issued before anything is read back, so that a GPU never waits for the host within a step, unless
    // spikes are looked for. Clipping, and skipping a gradient that is not finite, are decided on the device from the
    // norm. A skipped step changes no state, and the bias correction does not count it.
    double loss = 0, norm = 0;
    const auto fetch = [&] {
      loss = sum_of_losses(model, comm, shares(step_micro_batches, comm.ranks())) /
             static_cast<double>(o.total_batch_tokens);
      device.download(&norm, grad_norm.data(), 1);
    };
    double loss_z = std::nan(""), norm_z = std::nan("");
    if (o.skip_spikes > 0) {
      fetch();
      loss_z = losses.z(loss), norm_z = grad_norms.z(norm);
      losses.add(loss), grad_norms.add(norm);
    }
    const bool spike = loss_z > o.skip_spikes || norm_z > o.skip_spikes;  // false where there is no z
    const double lr = learning_rate(o, step, o.steps);
    const bool with_quality = o.edq_every && (step + 1) % o.edq_every == 0 && !spike;
    const AdamWScalars k =
        adamw_scalars(lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.grad_clip, 0, updates + 1, o.seed);
    for (auto& l : listeners) {
      if (&l == &listeners[0]) optimizer_watch.start();
      if (!spike) l.optimizer->update(l.params, model.grads(), k, o.grad_clip, grad_norm.data(), with_quality, device);
      if (&l == &listeners[0]) optimizer_watch.stop();
      if (o.zero && with_quality) comm.all_gather(l.optimizer->block_sums(), cut.blocks);
    }
    if (o.zero) {
      comm.all_gather(model.params(), cut.elements);
      comm.wait();
    }
    if (o.skip_spikes == 0) fetch();
    const bool finite = std::isfinite(norm);
    if (finite && !spike) {
      updates++;
      const double clip = o.grad_clip > 0 && norm > o.grad_clip ? o.grad_clip / norm : 1;
      shadow.update(model.grads(), lr, o.beta1, o.beta2, o.eps, o.weight_decay, clip, updates, device);
    } else if (spike) {
      printf("step %lld: loss %g, norm %g: a spike (z = %.1f and %.1f): update skipped\n",
             static_cast<long long>(step + 1), loss, norm, loss_z, norm_z);
    }
    bad_in_a_row = finite ? 0 : bad_in_a_row + 1;
    bool weights_finite = true;
    if (!finite) {
      const std::string weight = first_not_finite(model.params(), model.table.parameters, part, device, comm);
      const std::string grad = first_not_finite(model.grads(), model.table.parameters, part, device, comm);
      weights_finite = weight.empty();
      printf("step %lld: loss %g, norm %g, first in %s %s: update skipped, %lld in a row\n",
             static_cast<long long>(step + 1), loss, norm, weights_finite ? "the gradient of" : "the weights",
             weights_finite ? grad.c_str() : weight.c_str(), static_cast<long long>(bad_in_a_row));
    }
    QualitySums quality;  // of the run's own optimizer
    Record details;
    for (auto& l : listeners) {
      if (!with_quality || !finite) break;
      const std::vector<QualitySums> blocks = l.optimizer->quality(device);
      QualitySums all;
      std::vector<QualitySums> groups(model.table.groups.size());
      for (size_t b = 0; b < blocks.size(); b++) all += blocks[b], groups[model.table.block_group[b]] += blocks[b];
      add_quality(details, l.prefix, all);
      if (o.shadow) {
        std::vector<DriftSums> drifts = shadow.compare(*l.optimizer, l.params, device);
        if (o.zero) comm.share(drifts.data(), cut.blocks);
        add_drift(details, l.prefix, drifts);
      }
      if (&l != &listeners[0]) continue;
      quality = all;
      for (size_t g = 0; g < groups.size(); g++) add_quality(details, model.table.groups[g] + ".", groups[g]);
    }
    const double seconds = now() - step_start;

    Record r;
    r.add("step", step + 1).add("loss", loss).add("lr", lr).add("grad_norm", norm);
    r.add("tokens", (step + 1) * o.total_batch_tokens)
        .add("tokens_per_s", static_cast<double>(o.total_batch_tokens) / seconds);
    r.add("step_ms", seconds * 1e3).add("optimizer_ms", optimizer_watch.ms());
    if (peak > 0) r.add("mfu", step_flops / seconds / peak);
    if (!finite || spike) r.add("skipped", true).add("skipped_steps", step + 1 - updates);
    r.add_if_computed("loss_z", loss_z).add_if_computed("grad_norm_z", norm_z);
    if (step == to.step || (step == from.step && resumed.converts(now_in)))
      r.add("switched_to", listeners[0].precision.text);
    for (const auto& field : details.fields) r.fields.push_back(field);
    StepLine line{step + 1,
                  o.steps,
                  loss,
                  lr,
                  norm,
                  static_cast<double>(o.total_batch_tokens) / seconds,
                  with_quality && finite,
                  quality.edq(),
                  quality.lost_frac()};
    terminal.step(line);
    const auto due = [&](int64_t every) { return every && ((step + 1) % every == 0 || step + 1 == o.steps); };
    const bool validates = data.val && due(o.val_every);
    if (validates) {
      const double val_loss = validate(model, *data.val, o, comm);
      terminal.val(step + 1, o.steps, val_loss);
      r.add("val_loss", val_loss);
    }
    if (due(o.sample_every) && comm.rank() == 0) print_sample(step + 1);
    // All ranks do what one of them was asked for.
    for (const Signals& other : comm.gather(noted_signals())) {
      if (!asked.stop) asked.stop = other.stop;
      asked.save |= other.save;
    }
    give_up = o.max_bad_steps && bad_in_a_row >= o.max_bad_steps;
    const bool saves = !o.out.empty() && (due(o.checkpoint_every) || asked.stop || asked.save || give_up) &&
                       weights_finite;  // else it would take the place of a good one
    asked.save = false;
    if (saves) r.add("checkpoint_ms", copy_state());
    metrics.write(r);
    if (validates || asked.stop || give_up || step + 1 == o.steps) report.update();
    if (saves) start_checkpoint(step + 1);
    checkpoints.poll();
    fflush(stdout);
  }
  const bool written = checkpoints.finish();
  const std::string where = saved_step == step && written ? "its state is in " + o.out
                            : o.out.empty()               ? "nothing is kept without --out"
                                                          : "no checkpoint of it was written";
  if (give_up)
    RUN_ERROR("step %lld: %lld steps in a row without a finite gradient (--max-bad-steps): stopped; %s",
              static_cast<long long>(step), static_cast<long long>(bad_in_a_row), where.c_str());
  if (saved_step == step && !written) RUN_ERROR("step %lld, the last: %s", static_cast<long long>(step), where.c_str());
  if (asked.stop)
    printf("stopped by %s after step %lld of %lld; %s\n", asked.stop == SIGINT ? "SIGINT" : "SIGTERM",
           static_cast<long long>(step), static_cast<long long>(o.steps), where.c_str());
}

#ifndef TRAIN_GPT_NO_MAIN  // tests and benchmarks include this file
void run(int argc, char** argv, Comm& comm) {
  comm.join();
  Options o = parse_options(argc, argv);
  if (o.help || o.version || o.plan) {
    if (o.help)
      printf("%s", help_text().c_str());
    else if (o.version)
      printf("train_gpt %s\n", version());
    else
      print_plan(o, o.plan_ranks ? o.plan_ranks : comm.ranks());
    return comm.leave();
  }
  Resumed resumed;
  if (o.resume) resumed.checkpoint = newest_checkpoint(o.out);
  comm.require_same("checkpoint", resumed.checkpoint ? resumed.checkpoint->folder : "none");
  if (resumed.checkpoint) {
    const RunState& s = resumed.checkpoint->state;
    const std::string file = "--resume: " + resumed.checkpoint->folder + "/state.json";
    resumed.changes = take_flags(o, s.flags, file);
    resumed.stored = {s.precision + ":" + s.mcf, s.precision, s.mcf};
    if (!with_strategy(s.precision, s.mcf, [&]<class S>() {}))
      RUN_ERROR("%s: found the precision %s, which this version has not", file.c_str(), in_quotes(s.precision).c_str());
  }
  if (o.eval_only && !o.out.empty() && newest_checkpoint(o.out))
    USAGE_ERROR("--out: found a run with checkpoints in %s, expected another folder, or none, for --eval-only",
                in_quotes(o.out).c_str());
  std::string why_no_gpu;
  const int gpus = o.device == "cpu" ? 0 : Device::gpus(why_no_gpu);
  if (o.device == "cuda" && !gpus) RUN_ERROR("--device=cuda: %s; --device=cpu trains without", why_no_gpu.c_str());
  const bool cuda = gpus > 0;
  if (o.model.empty()) o.model = cuda ? "d12" : "d6";
  // What a resumed run began from may be gone: its flags state the shape, and the checkpoint has the weights.
  Options shape = o;
  if (resumed.checkpoint) shape.model.clear();
  const std::optional<ModelFile> file = model_file(shape);
  o.seq_len = model_config(shape, 0, file).max_T;
  comm.require_same("flags", strf("%s %s", version(), to_json(flag_values(o)).c_str()));
  Data data = open_data(o);
  const ModelConfig config = model_config(shape, static_cast<int>(data.first().vocab_size()), file);
  o.layers = config.L, o.heads = config.NH, o.channels = config.C, o.vocab_size = config.V;
  if (data.train) data.train->set_vocab_size(config.V);
  if (data.val) data.val->set_vocab_size(config.V);
  for (const auto* set : {&data.train, &data.val})
    if (*set) comm.require_same("data", strf("%s, vocabulary %d", describe(**set).c_str(), config.V));
  Device device(cuda ? DeviceKind::cuda : DeviceKind::cpu, cuda ? comm.local_rank() % gpus : 0,
                comm.threads(o.threads));
  const PrecisionName now_in = resumed.precision(o);
  with_strategy(now_in.precision, now_in.mode, [&]<class S>() {
    train<typename S::Theta>(o, config, file, data, resumed, now_in, command_line(argc, argv), precision_bytes<S>(),
                             S::meaning, why_no_gpu, device, comm);
  });
  comm.leave();
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  Comm comm;
  try {
    run(argc, argv, comm);
    return 0;
  } catch (const UsageError& e) {
    return comm.fail(2, e.what());
  } catch (const std::exception& e) {
    return comm.fail(1, e.what());
  }
}
#endif
