// Weights from files: every format gives the same numbers, and whatever is not the GPT-2 that this program computes is
// refused in one line that names it.
#include "runtime/model_file.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <random>

#include "dev/tests/model_files.h"
#include "runtime/error.h"

namespace {

using Tensors = std::vector<TestModel::Tensor>;

const TestModel model;

// Equal bits: all test weights are exact in every format.
void expect_model(const ModelFile& file, const std::string& what) {
  EXPECT_EQ(file.L, model.L) << what;
  EXPECT_EQ(file.C, model.C) << what;
  EXPECT_EQ(file.max_T, model.max_T) << what;
  EXPECT_EQ(file.V, model.V) << what;
  for (const auto& [name, w] : model.weights) {
    std::vector<float> values(w.values.size());
    file.read(name, 0, values.size(), values.data());
    EXPECT_EQ(values, w.values) << what << ": " << name;
  }
}

void expect_part(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
}

std::string error_of(const std::string& path) {
  const std::string message = message_of<RunError>([&] { ModelFile file(path, "--model"); });
  EXPECT_TRUE(message.starts_with("--model: ")) << message;
  return message;
}

std::string error_of(const TempDir& dir, const Tensors& tensors) {
  return error_of(dir.write("x.safetensors", TestModel::safetensors(tensors)));
}

// Changes the tensor of this name.
template <class Change>
Tensors with(const std::string& name, Change change) {
  Tensors tensors = model.tensors("F32");
  for (auto& t : tensors)
    if (t.info.name == name) change(t);
  return tensors;
}

TestModel::Tensor another(const std::string& name, const std::string& dtype, std::vector<int64_t> shape, size_t bytes) {
  return {{name, dtype, std::move(shape), 0, 0}, std::string(bytes, '\1')};
}

}  // namespace

TEST(ModelFile, EveryFormatGivesTheSameNumbers) {
  TempDir dir;
  for (const std::string dtype : {"F32", "F16", "BF16"}) {
    for (const std::string prefix : {"", "transformer."}) {
      const std::string path =
          dir.write(dtype + prefix + ".safetensors", TestModel::safetensors(model.tensors(dtype, prefix)));
      const ModelFile file(path, "--model");
      expect_model(file, dtype + prefix);
      EXPECT_EQ(file.NH, 0);
      EXPECT_EQ(file.dtype(), dtype);
    }
  }
  for (const int version : {3, 5}) {
    for (const int Vp : {model.V, 128}) {
      const ModelFile file(dir.write("m.bin", model.bin(version, Vp)), "--model");
      expect_model(file, strf("bin version %d", version));
      EXPECT_EQ(file.NH, model.NH);
      EXPECT_EQ(file.dtype(), version == 3 ? "F32" : "BF16");
    }
  }
  const ModelFile by_content(dir.write("named_otherwise", model.bin(3, model.V)), "--model");
  expect_model(by_content, "a .bin of another name");
}

TEST(ModelFile, FoldersAndTheConfigurationBeside) {
  TempDir dir;
  const std::string file = dir.write("model.safetensors", TestModel::safetensors(model.tensors("BF16")));
  expect_part(error_of(dir.path), "config.json: cannot be opened: No such file");
  EXPECT_EQ(ModelFile(file, "--model").NH, 0);
  dir.write("config.json", model.config());
  for (const std::string& path : {dir.path, dir.path + "/", file}) {
    const ModelFile read(path, "--model");
    expect_model(read, path);
    EXPECT_EQ(read.NH, model.NH);
  }
  dir.write("config.json", R"({"model_type": "gpt2"})");
  EXPECT_EQ(ModelFile(file, "--model").NH, 0);
  TempDir empty;
  expect_part(error_of(empty.path), "model.safetensors: cannot be opened: No such file");
  std::filesystem::create_directory(empty / "checkpoints");
  expect_part(error_of(empty.path), "the folder of a run, expected one of its checkpoints");
  expect_part(error_of(dir / "none.bin"), "none.bin: cannot be opened: No such file");
}

TEST(ModelFile, AnyPartCanBeRead) {
  TempDir dir;
  const TestModel wide(18);  // of more rows than are transposed at a time
  const ModelFile file(dir.write("x.safetensors", TestModel::safetensors(wide.tensors("F16"))), "--model");
  for (const std::string name :
       {"wte.weight", "h.1.mlp.c_fc.weight", "h.0.mlp.c_proj.weight", "h.1.attn.c_attn.bias"}) {
    const std::vector<float>& all = wide.weights.at(name).values;
    for (size_t first = 0; first <= all.size(); first += 1 + all.size() / 97) {
      for (size_t n = 0; n <= all.size() - first; n += 1 + all.size() / 89) {
        std::vector<float> part(n + 1, 99.0f);
        file.read(name, first, n, part.data());
        ASSERT_TRUE(std::equal(part.begin(), part.end() - 1, all.begin() + static_cast<int64_t>(first))) << name;
        ASSERT_EQ(part.back(), 99.0f) << name << " wrote beyond the end";
      }
    }
  }
}

TEST(ModelFile, EveryHalfIsItsFloat) {
  // 65536 halves as the vocabulary of a model of 2 channels; against ldexp.
  TempDir dir;
  TestModel all;
  Tensors tensors = all.tensors("F16");
  std::string bytes;
  for (int h = 0; h < 65536; h++) bytes += bytes_of(std::vector<uint16_t>{static_cast<uint16_t>(h)});
  tensors[0].info.shape[0] = 65536 / all.C;
  tensors[0].bytes = bytes;
  const ModelFile file(dir.write("x", TestModel::safetensors(tensors)), "--model");
  std::vector<float> values(65536);
  file.read("wte.weight", 0, values.size(), values.data());
  for (int h = 0; h < 65536; h++) {
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    const double magnitude = exponent == 31  ? fraction ? NAN : INFINITY
                             : exponent == 0 ? std::ldexp(fraction, -24)
                                             : std::ldexp(1024 + fraction, exponent - 25);
    const float x = values[static_cast<size_t>(h)];
    EXPECT_EQ(std::signbit(x), h >= 32768) << h;
    if (std::isnan(magnitude))
      EXPECT_TRUE(std::isnan(x)) << h;
    else
      EXPECT_EQ(std::fabs(x), magnitude) << h;
  }
}

TEST(ModelFile, MasksAndATiedProjectionAreNoMore) {
  TempDir dir;
  for (const std::string prefix : {"", "transformer."}) {
    Tensors tensors = model.tensors("F32", prefix);
    for (int l = 0; l < model.L; l++) {
      tensors.push_back(another(strf("%sh.%d.attn.bias", prefix.c_str(), l), "U8", {1, 1, 6, 6}, 36));
      tensors.push_back(another(strf("%sh.%d.attn.masked_bias", prefix.c_str(), l), "F32", {}, 4));
    }
    TestModel::Tensor head = tensors[0];
    head.info.name = "lm_head.weight";
    tensors.push_back(head);
    expect_model(ModelFile(dir.write("x", TestModel::safetensors(tensors)), "--model"), prefix);
    tensors.back().bytes.back() ^= 1;
    expect_part(error_of(dir, tensors), "lm_head.weight differs from wte.weight");
    tensors.back().bytes.back() ^= 1, tensors.back().info.dtype = "I32";
    expect_part(error_of(dir, tensors), "lm_head.weight differs from wte.weight");
    tensors.back() = another("lm_head.weight", "F64", {11, 4}, 352);
    expect_part(error_of(dir, tensors), "lm_head.weight differs from wte.weight");
    tensors.back() = another("lm_head.weight", "F32", {11, 5}, 220);
    expect_part(error_of(dir, tensors), "lm_head.weight differs from wte.weight");
  }
  for (const std::string name :
       {"h.2.attn.bias", "attn.bias", "h.0.attn.biased", "h.x.attn.bias", "transformer.wte.bias", "h.00.attn.bias",
        "score.weight", "transformer.h.0.attn.bias", "h.0.ln_1.weight ", ""}) {
    Tensors tensors = model.tensors("F32");
    tensors.push_back(another(name, "F32", {1}, 4));
    expect_part(error_of(dir, tensors), "tensor '" + name + "' belongs to no GPT-2 of 2 layers");
  }
}

TEST(ModelFile, MissingTensors) {
  TempDir dir;
  for (size_t i = 0; i < model.names.size(); i++) {
    for (const std::string prefix : {"", "transformer."}) {
      Tensors tensors = model.tensors("BF16", prefix);
      tensors.erase(tensors.begin() + static_cast<int64_t>(i));
      const std::string name = model.names[i], message = error_of(dir, tensors);
      // The count of layers comes from ln_1; without it the next tensors belong to nothing.
      if (name == "h.0.ln_1.weight")
        expect_part(message, "0 layers");
      else if (name == "h.1.ln_1.weight")
        expect_part(message, "belongs to no GPT-2 of 1 layers");
      else
        expect_part(message, "no tensor " + (name == "wte.weight" || name == "wpe.weight" ? name : prefix + name));
    }
  }
  expect_part(error_of(dir, {}), "no tensor wte.weight, expected a GPT-2 by the names of Hugging Face");
}

TEST(ModelFile, ShapesAndTypes) {
  TempDir dir;
  for (const std::string& name : model.names) {
    const auto flat = [](auto& t) { t.info.shape = {t.info.elements(), 1, 1}; };
    const std::string message = error_of(dir, with(name, flat));
    expect_part(message,
                name == "wte.weight" || name == "wpe.weight" ? name + " has 3 dimensions" : name + " has the shape");
    if (name != "wte.weight" && name != "wpe.weight") {
      const auto longer = [](auto& t) {
        const size_t row = t.bytes.size() / static_cast<size_t>(t.info.shape[0]);
        t.info.shape[0]++, t.bytes += std::string(row, '\1');
      };
      expect_part(error_of(dir, with(name, longer)), name + " has the shape");
    }
    const auto integers = [](auto& t) { t.info.dtype = "I32"; };
    expect_part(error_of(dir, with(name, integers)), name + " is I32, expected F32, F16 or BF16");
  }
  // Not transposed: a model of nn.Linear.
  const auto transposed = [](auto& t) { std::swap(t.info.shape[0], t.info.shape[1]); };
  expect_part(error_of(dir, with("h.1.mlp.c_fc.weight", transposed)), "has the shape [16,4], expected [4,16]");
  const auto empty = [](auto& t) { t.info.shape[0] = 0, t.bytes.clear(); };
  expect_part(error_of(dir, with("wte.weight", empty)), "0 tokens in the vocabulary, expected 1 to 16777216");
  expect_part(error_of(dir, with("wpe.weight", empty)), "0 positions");
}

TEST(ModelFile, Configurations) {
  TempDir dir;
  dir.write("model.safetensors", TestModel::safetensors(model.tensors("F32")));
  const auto config_error = [&](const std::string& text) {
    dir.write("config.json", text);
    return error_of(dir.path);
  };
  for (const std::string good :
       {R"("activation_function": "gelu_pytorch_tanh")", R"("activation_function": "gelu_new")",
        R"("layer_norm_epsilon": 1e-05)", R"("layer_norm_epsilon": 0.00001)", R"("n_inner": 16)", R"("n_inner": null)",
        R"("tie_word_embeddings": true)",
        R"("reorder_and_upcast_attn": false, "n_ctx": 6, "anything": {"else": [1]})"}) {
    dir.write("config.json", model.config(good));
    expect_model(ModelFile(dir.path, "--model"), good);
  }
  for (const std::string bad : {R"("activation_function": "gelu")",
                                R"("activation_function": null)",
                                R"("layer_norm_epsilon": 1e-06)",
                                R"("layer_norm_epsilon": "1e-05")",
                                R"("n_inner": 32)",
                                R"("tie_word_embeddings": false)",
                                R"("scale_attn_weights": false)",
                                R"("scale_attn_weights": 1)",
                                R"("scale_attn_by_inverse_layer_idx": true)",
                                R"("reorder_and_upcast_attn": true)",
                                R"("add_cross_attention": true)",
                                R"("n_layer": 3)",
                                R"("n_embd": 8)",
                                R"("n_positions": 1024)",
                                R"("vocab_size": 50257)",
                                R"("n_head": 3)",
                                R"("n_head": 0)",
                                R"("n_head": -2)",
                                R"("n_head": 2.0)",
                                R"("n_head": "2")",
                                R"("n_head": 4294967298)",
                                R"("n_head": null)",
                                R"("n_layer": [2])"}) {
    const std::string key = bad.substr(1, bad.find('"', 1) - 1);
    expect_part(config_error(model.config(bad)), "config.json: " + key + " is '");
  }
  expect_part(config_error(model.config(R"("n_layer": "\u001b[31m\n")")), "n_layer is '\"\\u001b[31m\\n\"'");
  expect_part(config_error(R"({"model_type": "llama"})"), "model_type is '\"llama\"', expected \"gpt2\"");
  expect_part(config_error("{}"), "no model_type");
  expect_part(config_error("[]"), "expected {");
  expect_part(config_error("null"), "expected {");
  expect_part(config_error(""), "not JSON: ");
  expect_part(config_error("{\"a\": "), "not JSON: ");
  expect_part(config_error("{} {}"), "not JSON: ");
  expect_part(config_error("{\"a\": \"\xff\"}"), "not JSON: ");
  expect_part(config_error("{\"a\": 1e999}"), "not JSON: ");
  expect_part(config_error("{\"a\": " + std::string(1'000'000, '[')), "nested deeper than 16 levels");
  expect_part(config_error("{" + std::string(1'100'000, ' ') + "}"), "expected a configuration of at most 1048576");
}

TEST(ModelFile, BinHeaders) {
  TempDir dir;
  const std::string good = model.bin(3, 128);
  const auto bin_error = [&](const std::string& bytes) { return error_of(dir.write("m.bin", bytes)); };
  const auto word = [&](size_t i, int32_t value) {
    std::string file = good;
    file.replace(4 * i, 4, bytes_of(std::vector<int32_t>{value}));
    return bin_error(file);
  };
  expect_part(word(0, 20240520), "not a model of llm.c: ");
  expect_part(bin_error(""), "an empty file; expected magic 20240326 (c6 d7 34 01)");
  expect_part(bin_error("PK\3\4"), "first bytes 50 4b 03 04");
  expect_part(bin_error(good.substr(0, 1023)), "cut short: 1023 bytes, expected a header of 1024");
  for (const int version : {-1, 0, 1, 2, 4, 6}) expect_part(word(1, version), strf("version %d of llm.c", version));
  expect_part(word(1, 5), "too long: ");
  const std::pair<size_t, const char*> sizes[] = {{2, "positions"}, {3, "tokens"}, {4, "layers"}, {6, "channels"}};
  for (const auto& [i, what] : sizes) {
    for (const int32_t bad : {0, -1, INT32_MIN, INT32_MAX}) expect_part(word(i, bad), strf("%d %s", bad, what));
    // The largest that are allowed each: no sum of them wraps.
    word(i, i == 2 ? 1048576 : i == 3 ? 16777216 : i == 4 ? 4096 : 262144);
  }
  for (const int32_t heads : {0, -1, 3, 8, INT32_MIN, INT32_MAX})
    expect_part(word(5, heads), strf("states %d heads", heads));
  for (const int32_t Vp : {0, -1, 10, INT32_MIN, INT32_MAX})
    expect_part(word(7, Vp), strf("padded vocabulary of %d", Vp));
  std::string all = good;
  all.replace(8, 24, bytes_of(std::vector<int32_t>{1048576, 16777216, 4096, 4096, 262144, 16777216}));
  expect_part(bin_error(all), "cut short: ");
  for (const size_t size : {size_t{1024}, size_t{1025}, good.size() / 2, good.size() - 1})
    expect_part(bin_error(good.substr(0, size)), "cut short: ");
  expect_part(bin_error(good + "x"), "too long: ");
}

TEST(ModelFile, WhatIsAPath) {
  TempDir dir;
  EXPECT_TRUE(ModelFile::is_path("runs/x"));
  EXPECT_TRUE(ModelFile::is_path("gpt2_124M.bin"));
  EXPECT_TRUE(ModelFile::is_path("x.safetensors"));
  EXPECT_TRUE(ModelFile::is_path(dir.path));
  EXPECT_FALSE(ModelFile::is_path("d12"));
  EXPECT_FALSE(ModelFile::is_path("gpt2:124M"));
}

TEST(ModelFile, NoFileContentCrashesIt) {
  // Random damage to good files: they load or say why not. The sanitizer builds watch.
  TempDir dir;
  const std::string bin = model.bin(5, 128), safetensors = TestModel::safetensors(model.tensors("BF16"));
  std::mt19937 random(7);
  for (int k = 0; k < 1000; k++) {
    std::string file = k % 2 ? bin : safetensors;
    const size_t header = k % 2 ? 32 : file.size() / 2;
    for (int n = 0; n < 1 + k % 3; n++) file[random() % header] = static_cast<char>(random());
    try {
      const ModelFile read(dir.write("x", file), "--model");
      std::vector<float> wte(static_cast<size_t>(read.V) * static_cast<size_t>(read.C));
      read.read("wte.weight", 0, wte.size(), wte.data());
    } catch (const RunError&) {
    }
  }
}
