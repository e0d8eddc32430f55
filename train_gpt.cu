// train_gpt: trains a GPT in the precision that --precision names. Read it top to bottom:
//   the parameter table, GPT (forward, backward), what runs around it (batches, validation, samples), the training
//   loop.
// The layers are in kernels/, the arithmetic of the optimizer in mcf/.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <numbers>
#include <optional>
#include <string>
#include <vector>

#include "dataloader/dataset.h"
#include "dataloader/tokenizer.h"
#include "kernels/attention.cuh"
#include "kernels/encoder.cuh"
#include "kernels/fused_classifier.cuh"
#include "kernels/gelu.cuh"
#include "kernels/global_norm.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/matmul.cuh"
#include "mcf/adamw.cuh"
#include "runtime/metrics.h"
#include "runtime/model_config.h"
#include "runtime/options.h"
#include "runtime/random.h"
#include "runtime/schedule.h"
#include "runtime/terminal.h"

// ---------------------------------------------------------------------------------------------------------------------
// The parameter table: every tensor, in the order in which they lie in one flat buffer. Weights, gradients and each
// optimizer state have this layout. Names are Hugging Face's for GPT-2.

enum class Init { normal, residual, ones, zeros };  // N(0, 0.02); N(0, 0.02 / sqrt(2L)); 1; 0

struct Parameter {
  std::string name;
  int64_t rows, columns;  // (rows, columns) row-major; a vector has one column
  int64_t used_rows;      // the rows beyond are padding and stay 0
  Init init;
  bool decay;    // weight decay applies: matrices, not biases and LayerNorm parameters
  size_t begin;  // first element in the flat buffer
  size_t n() const { return static_cast<size_t>(rows * columns); }
};

struct ParameterTable {
  std::vector<Parameter> parameters;
  std::vector<Block> blocks;  // of all tensors, for the optimizer and the norm
  size_t elements = 0;        // of the flat buffer, alignment and padding included
  int64_t count = 0;          // parameters of the model, without them
};

ParameterTable parameter_table(const ModelConfig& c) {
  ParameterTable table;
  const auto add = [&](std::string name, int64_t rows, int64_t columns, Init init, int64_t used_rows = -1) {
    const bool matrix = init == Init::normal || init == Init::residual;
    if (used_rows < 0) used_rows = rows;
    table.parameters.push_back({std::move(name), rows, columns, used_rows, init, matrix, table.elements});
    append_blocks(table.blocks, table.elements, static_cast<size_t>(rows * columns), matrix);
    const size_t n = static_cast<size_t>(rows * columns);
    table.elements += (n + tensor_alignment - 1) / tensor_alignment * tensor_alignment;
    table.count += used_rows * columns;
  };
  const int64_t C = c.C;
  add("wte.weight", c.Vp, C, Init::normal, c.V);
  add("wpe.weight", c.max_T, C, Init::normal);
  for (int l = 0; l < c.L; l++) {
    const std::string h = strf("h.%d.", l);
    add(h + "ln_1.weight", C, 1, Init::ones);
    add(h + "ln_1.bias", C, 1, Init::zeros);
    add(h + "attn.c_attn.weight", 3 * C, C, Init::normal);
    add(h + "attn.c_attn.bias", 3 * C, 1, Init::zeros);
    add(h + "attn.c_proj.weight", C, C, Init::residual);
    add(h + "attn.c_proj.bias", C, 1, Init::zeros);
    add(h + "ln_2.weight", C, 1, Init::ones);
    add(h + "ln_2.bias", C, 1, Init::zeros);
    add(h + "mlp.c_fc.weight", 4 * C, C, Init::normal);
    add(h + "mlp.c_fc.bias", 4 * C, 1, Init::zeros);
    add(h + "mlp.c_proj.weight", C, 4 * C, Init::residual);
    add(h + "mlp.c_proj.bias", C, 1, Init::zeros);
  }
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
void initialize(floatX* params, const ParameterTable& table, int L, uint64_t seed) {
  for (size_t p = 0; p < table.parameters.size(); p++) {
    const Parameter& t = table.parameters[p];
    floatX* w = params + t.begin;
    const int64_t used = t.used_rows * t.columns;
    if (t.init == Init::ones) {
      for (int64_t i = 0; i < used; i++) store(w[i], 1.0f);
    } else if (t.init != Init::zeros) {
      const double std = t.init == Init::residual ? 0.02 / std::sqrt(2.0 * L) : 0.02;
#pragma omp parallel for
      for (int64_t i = 0; i < used; i += 2) {  // Box and Muller (1958): two normal numbers from two uniform ones
        const double radius =
            std * std::sqrt(-2.0 * std::log(1.0 - random_uniform(seed, p, static_cast<uint64_t>(i), 0)));
        const double angle = 2.0 * std::numbers::pi * random_uniform(seed, p, static_cast<uint64_t>(i), 1);
        store(w[i], rn(static_cast<float>(radius * std::cos(angle))));
        if (i + 1 < used) store(w[i + 1], rn(static_cast<float>(radius * std::sin(angle))));
      }
    }
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

// What forward leaves for backward.
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

  void lay_out(Layout& layout, const ModelConfig& c, int B, int T) {
    const size_t BT = static_cast<size_t>(B) * T, BTC = BT * c.C;
    layers.resize(static_cast<size_t>(c.L));
    layout(encoded, BTC);
    for (auto& l : layers) {
      layout(l.ln1, BTC), layout(l.ln1_mean, BT), layout(l.ln1_rstd, BT);
      layout(l.qkv, 3 * BTC), layout(l.lse, BT * c.NH), layout(l.atty, BTC), layout(l.residual2, BTC);
      layout(l.ln2, BTC), layout(l.ln2_mean, BT), layout(l.ln2_rstd, BT);
      layout(l.fch, 4 * BTC), layout(l.fch_gelu, 4 * BTC), layout(l.residual3, BTC);
    }
    layout(lnf, BTC), layout(lnf_mean, BT), layout(lnf_rstd, BT), layout(losses, BT);
  }
};

// What is used and forgotten within a step.
template <class floatX>
struct Workspace {
  int chunk_rows;     // rows of logits that exist at a time
  floatX* logits;     // (chunk_rows, Vp)
  floatX* projected;  // (B,T,C) output of a projection, before it joins the residual
  floatX* dresidual;  // (B,T,C) gradient of the residual stream
  floatX* dbtc;       // (B,T,C)
  floatX* dbt4c;      // (B,T,4C)
  float* dwte;        // (Vp,C) gradient of the tied embedding: both contributions, before it is rounded

  void lay_out(Layout& layout, const ModelConfig& c, int B, int T) {
    const size_t BTC = static_cast<size_t>(B) * T * c.C;
    chunk_rows = std::min(B * T, std::max(256, (1 << 24) / c.Vp / 256 * 256));  // about 32 MiB of bf16
    layout(logits, static_cast<size_t>(chunk_rows) * c.Vp), layout(projected, BTC), layout(dresidual, BTC);
    layout(dbtc, BTC), layout(dbt4c, 4 * BTC), layout(dwte, static_cast<size_t>(c.Vp) * c.C);
  }
};

template <class floatX>
class GPT {
 public:
  const ModelConfig config;
  const ParameterTable table;

  // Room for micro-batches of up to (B,T) tokens.
  GPT(const ModelConfig& c, int B, int T, uint64_t seed, Device& device)
      : config(c),
        table(parameter_table(c)),
        device_(device),
        params_(device, Memory::weights, table.elements),
        grads_(device, Memory::gradients, table.elements),
        w_(params_, table, c.L),
        dw_(grads_, table, c.L) {
    activation_memory_ = lay_out(acts_, Memory::activations, B, T);
    work_memory_ = lay_out(work_, Memory::workspace, B, T);
    initialize(params_.data(), table, c.L, seed);
  }

  floatX* params() { return params_; }
  floatX* grads() { return grads_; }
  void zero_gradients() {
    Scope scope("zero_gradients", device_);
#pragma omp parallel for
    for (size_t b = 0; b < table.blocks.size(); b++)
      memset(grads_ + table.blocks[b].begin, 0, table.blocks[b].n * sizeof(floatX));
  }

  // Runs the blocks on tokens (B,T), up to the last LayerNorm.
  void forward(const int* tokens, int B, int T) {
    const int C = config.C, NH = config.NH;
    auto& a = acts_;
    encoder_forward(a.encoded, tokens, w_.wte, w_.wpe, B, T, C, device_);
    const floatX* residual = a.encoded;
    for (int i = 0; i < config.L; i++) {
      const auto& w = w_.layers[static_cast<size_t>(i)];
      auto& l = a.layers[static_cast<size_t>(i)];
      if (i == 0) layernorm_forward(l.ln1, l.ln1_mean, l.ln1_rstd, residual, w.ln1w, w.ln1b, B, T, C, device_);
      matmul_forward(l.qkv, l.ln1, w.qkvw, w.qkvb, B, T, C, 3 * C, device_);
      attention_forward(l.atty, l.lse, l.qkv, B, T, C, NH, device_);
      matmul_forward(work_.projected, l.atty, w.attprojw, w.attprojb, B, T, C, C, device_);
      residual_layernorm_forward(l.residual2, l.ln2, l.ln2_mean, l.ln2_rstd, residual, work_.projected, w.ln2w, w.ln2b,
                                 B, T, C, device_);
      matmul_forward(l.fch, l.ln2, w.fcw, w.fcb, B, T, C, 4 * C, device_);
      gelu_forward(l.fch_gelu, l.fch, static_cast<size_t>(B) * T * 4 * C, device_);
      matmul_forward(work_.projected, l.fch_gelu, w.fcprojw, w.fcprojb, B, T, 4 * C, C, device_);
      // The addition that ends this block and the LayerNorm that starts the next are one pass.
      if (i + 1 < config.L) {
        const auto& next_w = w_.layers[static_cast<size_t>(i) + 1];
        auto& next = a.layers[static_cast<size_t>(i) + 1];
        residual_layernorm_forward(l.residual3, next.ln1, next.ln1_mean, next.ln1_rstd, l.residual2, work_.projected,
                                   next_w.ln1w, next_w.ln1b, B, T, C, device_);
      } else {
        residual_layernorm_forward(l.residual3, a.lnf, a.lnf_mean, a.lnf_rstd, l.residual2, work_.projected, w_.lnfw,
                                   w_.lnfb, B, T, C, device_);
      }
      residual = l.residual3;
    }
  }

  // Sum of the losses of the last forward, in nats. targets (B,T).
  double loss(const int* targets, int B, int T) { return classify(targets, B, T, 0.0f, false); }

  // The same, and adds to the gradients those of loss_scale * (sum of the losses).
  double loss_and_backward(const int* tokens, const int* targets, float loss_scale, int B, int T) {
    const int C = config.C, NH = config.NH;
    const size_t BT = static_cast<size_t>(B) * T;
    auto& a = acts_;
    floatX *dresidual = work_.dresidual, *dbtc = work_.dbtc, *dbt4c = work_.dbt4c;
    {
      Scope scope("zero_dwte", device_);
#pragma omp parallel for
      for (int v = 0; v < config.Vp; v++)
        memset(work_.dwte + static_cast<size_t>(v) * C, 0, static_cast<size_t>(C) * sizeof(float));
      memset(dresidual, 0, BT * C * sizeof(floatX));
    }
    const double loss = classify(targets, B, T, loss_scale, true);  // leaves the gradient of lnf in dbtc
    const auto& last = a.layers.back();
    layernorm_backward(dresidual, dw_.lnfw, dw_.lnfb, dbtc, last.residual3, w_.lnfw, a.lnf_mean, a.lnf_rstd, B, T, C,
                       device_);
    for (int i = config.L - 1; i >= 0; i--) {
      const auto& w = w_.layers[static_cast<size_t>(i)];
      const auto& dw = dw_.layers[static_cast<size_t>(i)];
      const auto& l = a.layers[static_cast<size_t>(i)];
      const floatX* residual = i == 0 ? a.encoded : a.layers[static_cast<size_t>(i) - 1].residual3;
      matmul_backward(dbt4c, dw.fcprojw, dw.fcprojb, dresidual, l.fch_gelu, w.fcprojw, B, T, 4 * C, C, device_);
      gelu_backward(dbt4c, l.fch, BT * 4 * C, device_);
      matmul_backward(dbtc, dw.fcw, dw.fcb, dbt4c, l.ln2, w.fcw, B, T, C, 4 * C, device_);
      layernorm_backward(dresidual, dw.ln2w, dw.ln2b, dbtc, l.residual2, w.ln2w, l.ln2_mean, l.ln2_rstd, B, T, C,
                         device_);
      matmul_backward(dbtc, dw.attprojw, dw.attprojb, dresidual, l.atty, w.attprojw, B, T, C, C, device_);
      floatX* dqkv = dbt4c;
      attention_backward(dqkv, dbtc, l.atty, l.lse, l.qkv, B, T, C, NH, device_);
      matmul_backward(dbtc, dw.qkvw, dw.qkvb, dqkv, l.ln1, w.qkvw, B, T, C, 3 * C, device_);
      layernorm_backward(dresidual, dw.ln1w, dw.ln1b, dbtc, residual, w.ln1w, l.ln1_mean, l.ln1_rstd, B, T, C, device_);
    }
    encoder_backward(work_.dwte, dw_.wpe, dresidual, tokens, B, T, C, device_);
    add_embedding_gradient(dw_.wte, work_.dwte, static_cast<size_t>(config.Vp) * C, device_);
    return loss;
  }

  // Logits (Vp) that follow token t of the last forward of one sequence. Valid until the next call.
  const floatX* logits(int t) {
    matmul_forward(work_.logits, acts_.lnf + static_cast<size_t>(t) * config.C, w_.wte,
                   static_cast<const floatX*>(nullptr), 1, 1, config.C, config.Vp, device_);
    return work_.logits;
  }

 private:
  template <class Pointers>
  Buffer<char> lay_out(Pointers& pointers, Memory memory, int B, int T) {
    Layout plan;
    pointers.lay_out(plan, config, B, T);
    Buffer<char> buffer(device_, memory, plan.bytes());
    Layout layout(buffer);
    pointers.lay_out(layout, config, B, T);
    return buffer;
  }

  // The output projection and the loss, in chunks of rows: the logits of a whole batch would be the largest tensor by
  // far.
  double classify(const int* targets, int B, int T, float loss_scale, bool backward) {
    const int C = config.C, V = config.V, Vp = config.Vp, rows = B * T;
    constexpr floatX* no_bias = nullptr;
    for (int r = 0; r < rows; r += work_.chunk_rows) {
      const int n = std::min(work_.chunk_rows, rows - r);
      const floatX* lnf = acts_.lnf + static_cast<size_t>(r) * C;
      matmul_forward(work_.logits, lnf, w_.wte, no_bias, 1, n, C, Vp, device_);
      fused_classifier(acts_.losses + r, work_.logits, targets + r, loss_scale, n, V, Vp, backward, device_);
      if (backward)
        matmul_backward(work_.dbtc + static_cast<size_t>(r) * C, work_.dwte, no_bias, work_.logits, lnf, w_.wte, 1, n,
                        C, Vp, device_);
    }
    double sum = 0;
    for (int r = 0; r < rows; r++) sum += acts_.losses[r];
    return sum;
  }

  Device& device_;
  Buffer<floatX> params_, grads_;
  Tensors<floatX> w_, dw_;
  Activations<floatX> acts_;
  Workspace<floatX> work_;
  Buffer<char> activation_memory_, work_memory_;
};

// ---------------------------------------------------------------------------------------------------------------------
// Around the model: batches, validation, samples.

struct Batch {
  int B, T;
  std::vector<int> tokens, targets;  // (B,T)
  Batch(int B, int T)
      : B(B), T(T), tokens(static_cast<size_t>(B) * T), targets(tokens.size()), row_(static_cast<size_t>(T) + 1) {}

  // Fills row b by read(out), which gives T + 1 ids.
  template <class Read>
  void fill_row(int b, Read&& read) {
    read(row_.data());
    std::copy(row_.begin(), row_.end() - 1, tokens.begin() + static_cast<int64_t>(b) * T);
    std::copy(row_.begin() + 1, row_.end(), targets.begin() + static_cast<int64_t>(b) * T);
  }

 private:
  std::vector<int32_t> row_;
};

// Mean loss over the first sequences of the validation set, in file order; every token counts the same, whatever B is.
template <class floatX>
double validate(GPT<floatX>& model, Dataset& data, const Options& o) {
  const int64_t sequences = o.val_sequences ? std::min(o.val_sequences, data.sequences()) : data.sequences();
  Batch batch(o.batch_size, o.seq_len);
  double sum = 0;
  for (int64_t i = 0; i < sequences; i += batch.B) {
    const int rows = static_cast<int>(std::min<int64_t>(batch.B, sequences - i));
    for (int b = 0; b < rows; b++) batch.fill_row(b, [&](int32_t* out) { data.read(i + b, out); });
    model.forward(batch.tokens.data(), rows, batch.T);
    sum += model.loss(batch.targets.data(), rows, batch.T);
  }
  return sum / static_cast<double>(sequences * batch.T);
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
    const floatX* logits = model.logits(static_cast<int>(seen) - 1);
    double max = -HUGE_VAL, sum = 0, chosen = 0;
    for (int v = 0; v < model.config.V; v++) max = std::max(max, static_cast<double>(to_float(logits[v])));
    for (int v = 0; v < model.config.V; v++) sum += std::exp(to_float(logits[v]) - max);
    const double coin = random_uniform(o.seed, ~uint64_t{0}, static_cast<uint64_t>(step), tokens.size()) * sum;
    int32_t token = 0;
    while (token < model.config.V - 1 && (chosen += std::exp(to_float(logits[token]) - max)) <= coin) token++;
    tokens.push_back(token);
  }
  return tokens;
}

// ---------------------------------------------------------------------------------------------------------------------
// The run.

struct Data {
  std::optional<Dataset> train, val;
  std::optional<Tokenizer> tokenizer;
};

// Opens the shards that the flags name, or the prepared ones where no flag does, and completes the options.
Data open_data(Options& o) {
  if (o.train_data.empty() && o.val_data.empty()) {
    const std::string train = "data/kjv/train_*.bin", val = "data/kjv/val_*.bin";
    if (!std::filesystem::exists("data/kjv/train_000.bin"))
      USAGE_ERROR("--train-data: not given, and %s is not there; prepare it with scripts/prepare_data.py kjv",
                  train.c_str());
    o.train_data = train, o.val_data = val;
  }
  if (o.train_data.empty() && !o.eval_only)
    USAGE_ERROR("--train-data: not given, only --val-data; --eval-only needs no more");
  if (o.val_data.empty() && o.eval_only) USAGE_ERROR("--eval-only: needs --val-data");
  Data data;
  if (!o.train_data.empty()) data.train.emplace(o.train_data, o.seq_len, "--train-data");
  if (!o.val_data.empty()) data.val.emplace(o.val_data, o.seq_len, "--val-data");
  if (data.train && data.val) data.train->require_same_tokens(*data.val);
  const Dataset& first = data.train ? *data.train : *data.val;
  if (const std::string path = first.tokenizer_path(); !path.empty()) {
    data.tokenizer.emplace(path);
    data.tokenizer->require_made(first.vocab_size(), first.tokenizer_crc(), data.train ? "--train-data" : "--val-data");
  }
  return data;
}

std::vector<int32_t> prompt_tokens(const Options& o, const std::optional<Tokenizer>& tokenizer, int V) {
  if (o.prompt.empty()) return {tokenizer ? tokenizer->eot() : V - 1};
  if (!tokenizer) USAGE_ERROR("--prompt: there is no tokenizer.bin beside the shards to encode it with");
  return tokenizer->encode(o.prompt);
}

std::string describe(const Dataset& data) {
  return strf("%s tokens in %s shard%s, %s sequences (%s tail tokens never seen)", human_count(data.tokens()).c_str(),
              human_count(data.shards()).c_str(), data.shards() == 1 ? "" : "s", human_count(data.sequences()).c_str(),
              human_count(data.dropped_tokens()).c_str());
}

template <class floatX>
void train(Options o, const ModelConfig& config, Data& data, const std::string& command, int bytes_per_param,
           const char* meaning, Device& device) {
  const auto now = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  };
  const int B = o.batch_size, T = o.seq_len;

  // The batch: micro-batches of B x T tokens, as many as make up the total.
  const int64_t micro_tokens = static_cast<int64_t>(B) * T;
  if (o.total_batch_tokens == 0) o.total_batch_tokens = micro_tokens;
  if (o.total_batch_tokens % micro_tokens)
    USAGE_ERROR("--total-batch-tokens: %lld is no multiple of batch-size x seq-len = %d x %d = %lld; try %lld",
                static_cast<long long>(o.total_batch_tokens), B, T, static_cast<long long>(micro_tokens),
                static_cast<long long>((o.total_batch_tokens / micro_tokens + 1) * micro_tokens));
  const int64_t micro_batches = o.total_batch_tokens / micro_tokens, step_sequences = micro_batches * B;
  if (!o.eval_only && o.steps == 0) {
    o.steps = data.train->sequences() / step_sequences;
    if (o.steps == 0)
      USAGE_ERROR(
          "--steps: one epoch is %lld sequences, less than the %lld of one step; give --steps or a smaller batch",
          static_cast<long long>(data.train->sequences()), static_cast<long long>(step_sequences));
  }
  if (o.edq_every < 0) o.edq_every = 1;
  const std::vector<int32_t> prompt = prompt_tokens(o, data.tokenizer, config.V);

  const double start = now();
  GPT<floatX> model(config, B, T, o.seed, device);
  std::unique_ptr<Optimizer<floatX>> optimizer;
  if (!o.eval_only) optimizer = make_optimizer(o.precision, model.params(), model.table.elements, device);
  const double peak = measured_product_peak(sizeof(floatX) == 2, device);
  const double step_flops = 6.0 * static_cast<double>(model.table.count) * static_cast<double>(o.total_batch_tokens);

  Metrics metrics(o.out);
  printf("train_gpt  %s\n", version());
  printf("device     CPU, %d thread%s, %s, %.0f GFLOP/s measured\n", device.threads(), device.threads() == 1 ? "" : "s",
         product_library().c_str(), peak / 1e9);
  if (const std::string warning = product_warning();
      !warning.empty() && (sizeof(floatX) == 2 || product_library()[0] == 'p'))
    printf("           %s\n", warning.c_str());
  printf("model      %s: %d layers, %d channels, %d heads, T = %d, vocabulary %d (padded to %d), %s parameters\n",
         o.model.c_str(), config.L, config.C, config.NH, T, config.V, config.Vp,
         human_count(model.table.count).c_str());
  printf("precision  %s: %s, %d bytes a parameter with its gradient\n", o.precision.c_str(), meaning, bytes_per_param);
  if (data.train) printf("train      %s\n", describe(*data.train).c_str());
  printf("val        %s\n", data.val ? describe(*data.val).c_str() : "none: no --val-data");
  if (data.train && data.val)
    for (int64_t i = 0; i < data.val->shards(); i++)
      for (int64_t j = 0; j < data.train->shards(); j++)
        if (std::filesystem::equivalent(data.val->path(i), data.train->path(j)))
          printf("           warning: %s is trained on and validated on\n", data.val->path(i).c_str());
  if (!o.eval_only)
    printf("batch      %s tokens a step: %lld x %d sequences; %s steps, %.3g epochs\n",
           human_count(o.total_batch_tokens).c_str(), static_cast<long long>(micro_batches), B,
           human_count(o.steps).c_str(),
           static_cast<double>(o.steps * step_sequences) / static_cast<double>(data.train->sequences()));
  Record memory;
  printf("memory    ");
  for (size_t m = 0; m < memory_names.size(); m++) {
    const int64_t bytes = device.bytes(static_cast<Memory>(m));
    memory.add(memory_names[m], bytes);
    printf(" %s %s%s", memory_names[m], human_bytes(static_cast<double>(bytes)).c_str(),
           m + 1 < memory_names.size() ? "," : "\n");
  }
  if (!o.out.empty()) printf("output     %s\n", metrics.path().c_str());
  if (!metrics.moved_to().empty())
    printf("           an earlier run's metrics are now in %s\n", metrics.moved_to().c_str());
  printf("           ready in %s\n", human_time(now() - start).c_str());
  fflush(stdout);

  Record run;
  run.add("command", command).add("version", version()).add("precision", o.precision).add("device", "cpu");
  run.add("threads", device.threads()).add("isa", product_library()).add("flags", flag_values(o));
  run.add("parameters", model.table.count).add("bytes_per_param", bytes_per_param).add("memory", memory);
  metrics.write(run);

  const auto print_sample = [&](int64_t step) {
    const std::vector<int32_t> tokens = sample(model, prompt, o, step);
    std::string text;
    for (const int32_t token : tokens)
      text += data.tokenizer ? std::string(data.tokenizer->decode(token)) : strf("%d ", token);
    printf("%s\n", wrapped(text, 110).c_str());
  };
  if (o.eval_only) {
    const double val_loss = validate(model, *data.val, o);
    printf("%s\n", val_line(0, 0, val_loss).c_str());
    metrics.write(Record().add("step", 0).add("val_loss", val_loss));
    if (o.sample_every) print_sample(0);
    return;
  }

  // The training loop.
  Terminal terminal;
  Batch batch(B, T);
  int64_t updates = 0;
  for (int64_t step = 0; step < o.steps; step++) {
    const double step_start = now();
    model.zero_gradients();
    double loss = 0;
    for (int64_t micro = 0; micro < micro_batches; micro++) {
      const int64_t first = (o.overfit_batch ? 0 : step * step_sequences) + micro * B;
      for (int b = 0; b < B; b++)
        batch.fill_row(b, [&](int32_t* out) { data.train->read_shuffled(first + b, o.seed, out); });
      model.forward(batch.tokens.data(), B, T);
      loss += model.loss_and_backward(batch.tokens.data(), batch.targets.data(),
                                      1.0f / static_cast<float>(o.total_batch_tokens), B, T);
    }
    loss /= static_cast<double>(o.total_batch_tokens);
    const double norm = global_norm(model.grads(), model.table.blocks, device);
    const double lr = learning_rate(o, step, o.steps);

    // A gradient that is not finite updates nothing: no state changes, and the bias correction does not count it.
    const bool finite = std::isfinite(norm), with_quality = finite && o.edq_every && (step + 1) % o.edq_every == 0;
    const double optimizer_start = now();
    QualitySums quality;
    if (finite) {
      updates++;
      const AdamWScalars k = adamw_scalars(lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.grad_clip, norm, updates);
      quality = optimizer->update(model.params(), model.grads(), model.table.blocks, k, with_quality, device);
    } else {
      printf("step %lld: the gradient is not finite (loss %g): update skipped\n", static_cast<long long>(step + 1),
             loss);
    }
    const double end = now(), seconds = end - step_start;

    Record r;
    r.add("step", step + 1).add("loss", loss).add("lr", lr).add("grad_norm", norm);
    r.add("tokens", (step + 1) * o.total_batch_tokens)
        .add("tokens_per_s", static_cast<double>(o.total_batch_tokens) / seconds);
    r.add("step_ms", seconds * 1e3)
        .add("optimizer_ms", (end - optimizer_start) * 1e3)
        .add("mfu", step_flops / seconds / peak);
    if (!finite) r.add("skipped", true);
    if (with_quality) {
      r.add_if_computed("edq", quality.edq()).add_if_computed("edq_hi", quality.edq_hi());
      r.add("update_norm", quality.update_norm()).add("effective_norm", quality.effective_norm());
      r.add("effective_norm_hi", quality.effective_norm_hi()).add("lost_frac", quality.lost_frac());
      r.add("lost_frac_hi", quality.lost_frac_hi()).add("stale_v_frac", quality.stale_v_frac());
    }
    StepLine line{step + 1,     o.steps,       loss,
                  lr,           norm,          static_cast<double>(o.total_batch_tokens) / seconds,
                  with_quality, quality.edq(), quality.lost_frac()};
    terminal.step(line);
    const auto due = [&](int64_t every) { return every && ((step + 1) % every == 0 || step + 1 == o.steps); };
    if (data.val && due(o.val_every)) {
      const double val_loss = validate(model, *data.val, o);
      terminal.val(step + 1, o.steps, val_loss);
      r.add("val_loss", val_loss);
    }
    if (due(o.sample_every)) print_sample(step + 1);
    metrics.write(r);
    fflush(stdout);
  }
}

void run(int argc, char** argv) {
  Options o = parse_options(argc, argv);
  if (o.help) return void(printf("%s", help_text().c_str()));
  if (o.version) return void(printf("train_gpt %s\n", version()));
  if (o.device == "cuda") USAGE_ERROR("--device: cuda, but this build has no GPU support; use --device=cpu");
  if (o.model.empty()) o.model = "d6";
  o.seq_len = model_config(o, 0).max_T;
  Data data = open_data(o);
  const ModelConfig config = model_config(o, static_cast<int>((data.train ? *data.train : *data.val).vocab_size()));
  if (data.train) data.train->set_vocab_size(config.V);
  if (data.val) data.val->set_vocab_size(config.V);
  Device device(o.threads);
  with_strategy(o.precision, [&]<class S>() {
    train<typename S::Theta>(o, config, data, command_line(argc, argv), bytes_per_parameter<S>(), S::meaning, device);
  });
}

#ifndef TRAIN_GPT_NO_MAIN  // tests and benchmarks include this file
int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    run(argc, argv);
    return 0;
  } catch (const UsageError& e) {
    fprintf(stderr, "train_gpt: error: %s\n", e.what());
    return 2;
  } catch (const std::exception& e) {
    fprintf(stderr, "train_gpt: error: %s\n", e.what());
    return 1;
  }
}
#endif
