// For tests: small GPT-2s in files of every kind that ModelFile reads.
#pragma once
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "dev/tests/temp_dir.h"
#include "mcf/bf16.h"
#include "runtime/safetensors.h"

// Weights by name in this program's layout, (out, in) row-major; all on the grid of F16 and of BF16, so that every
// format holds the same numbers.
struct TestModel {
  int L = 2, NH = 2, C, max_T = 6, V = 11;
  struct Weight {
    int rows, columns;  // a vector has columns 0
    std::vector<float> values;
  };
  std::vector<std::string> names;  // in llm.c's order, layer by layer within a kind
  std::map<std::string, Weight> weights;

  explicit TestModel(int channels = 4) : C(channels) {
    const auto add = [&](const std::string& name, int rows, int columns) {
      Weight w{rows, columns, {}};
      const int n = rows * std::max(columns, 1), salt = static_cast<int>(names.size());
      for (int i = 0; i < n; i++)
        w.values.push_back(static_cast<float>((i * 37 + salt * 11) % 201 - 100) / 128.0f * std::exp2f(-(i % 5)));
      names.push_back(name);
      weights[name] = w;
    };
    add("wte.weight", V, C), add("wpe.weight", max_T, C);
    const struct {
      const char* name;
      int rows, columns;
    } kinds[] = {{"ln_1.weight", C, 0},
                 {"ln_1.bias", C, 0},
                 {"attn.c_attn.weight", 3 * C, C},
                 {"attn.c_attn.bias", 3 * C, 0},
                 {"attn.c_proj.weight", C, C},
                 {"attn.c_proj.bias", C, 0},
                 {"ln_2.weight", C, 0},
                 {"ln_2.bias", C, 0},
                 {"mlp.c_fc.weight", 4 * C, C},
                 {"mlp.c_fc.bias", 4 * C, 0},
                 {"mlp.c_proj.weight", C, 4 * C},
                 {"mlp.c_proj.bias", C, 0}};
    for (const auto& k : kinds)
      for (int l = 0; l < L; l++) add("h." + std::to_string(l) + "." + k.name, k.rows, k.columns);
    add("ln_f.weight", C, 0), add("ln_f.bias", C, 0);
  }

  // A number's bytes as "F32", "F16" or "BF16"; exact for the values here.
  static std::string encoded(float x, const std::string& dtype) {
    if (dtype == "F32") return bytes_of(std::vector<float>{x});
    bf16 b;
    store(b, x);
    if (dtype == "BF16") return bytes_of(std::vector<bf16>{b});
    int exponent = 0;
    const float significand = std::frexp(std::fabs(x), &exponent);  // x = significand * 2^exponent, in [.5, 1)
    uint16_t h = x < 0 ? 0x8000 : 0;
    if (x != 0) h |= static_cast<uint16_t>(((exponent + 14) << 10) + static_cast<int>(significand * 2048) - 1024);
    return bytes_of(std::vector<uint16_t>{h});
  }

  struct Tensor {
    TensorInfo info;
    std::string bytes;
  };
  // As Hugging Face has them, matrices of Conv1D transposed.
  std::vector<Tensor> tensors(const std::string& dtype, const std::string& prefix = "") const {
    std::vector<Tensor> all;
    for (const std::string& name : names) {
      const Weight& w = weights.at(name);
      const bool transposed = w.columns > 0 && name.starts_with("h.");
      Tensor t{{prefix + name, dtype, {w.rows}, 0, 0}, ""};
      if (w.columns) t.info.shape.insert(transposed ? t.info.shape.begin() : t.info.shape.end(), w.columns);
      for (int i = 0; i < static_cast<int>(w.values.size()); i++) {
        const int from = transposed ? i % w.rows * w.columns + i / w.rows : i;
        t.bytes += encoded(w.values[static_cast<size_t>(from)], dtype);
      }
      all.push_back(t);
    }
    return all;
  }
  static std::string safetensors(const std::vector<Tensor>& tensors) {
    std::vector<TensorInfo> infos;
    std::string data;
    for (const Tensor& t : tensors) infos.push_back(t.info), data += t.bytes;
    return safetensors_header(infos, true) + data;
  }
  // llm.c's, with this padded vocabulary.
  std::string bin(int version, int Vp) const {
    std::vector<int32_t> header(256, 0);
    const int32_t words[] = {20240326, version, max_T, V, L, NH, C, Vp};
    std::copy(std::begin(words), std::end(words), header.begin());
    std::string file = bytes_of(header);
    for (const std::string& name : names) {
      for (const float x : weights.at(name).values) file += encoded(x, version == 3 ? "F32" : "BF16");
      if (name == "wte.weight")
        for (int i = 0; i < (Vp - V) * C; i++) file += encoded(77.0f, version == 3 ? "F32" : "BF16");  // no zeros
    }
    return file;
  }
  // config.json; more: further fields, or other values of these.
  std::string config(const std::string& more = "") const {
    const auto field = [](const char* name, int value) {
      return std::string("\"") + name + "\": " + std::to_string(value) + ", ";
    };
    return "{" + field("n_layer", L) + field("n_head", NH) + field("n_embd", C) + field("n_positions", max_T) +
           field("vocab_size", V) + (more.empty() ? "" : more + ", ") + "\"model_type\": \"gpt2\"}";
  }
};
