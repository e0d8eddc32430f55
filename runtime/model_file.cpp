#include "runtime/model_file.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "mcf/bf16.h"
#include "runtime/error.h"
#include "runtime/options.h"

namespace {

using nlohmann::json;

// The tensors of a block in llm.c's order of kinds. Sizes in units of C; a vector has columns 0.
struct Kind {
  const char* name;
  int rows, columns;
};
constexpr Kind kinds[] = {{"ln_1.weight", 1, 0},      {"ln_1.bias", 1, 0},          {"attn.c_attn.weight", 3, 1},
                          {"attn.c_attn.bias", 3, 0}, {"attn.c_proj.weight", 1, 1}, {"attn.c_proj.bias", 1, 0},
                          {"ln_2.weight", 1, 0},      {"ln_2.bias", 1, 0},          {"mlp.c_fc.weight", 4, 1},
                          {"mlp.c_fc.bias", 4, 0},    {"mlp.c_proj.weight", 1, 4},  {"mlp.c_proj.bias", 1, 0}};

// What --layers, --channels, --seq-len and --vocab-size allow. Products of them, and so file sizes, fit an int64_t.
constexpr int64_t kMostL = 4096, kMostC = 262144, kMostT = 1048576, kMostV = 16777216;

constexpr int32_t kBinMagic = 20240326;
constexpr int64_t kBinHeaderBytes = 256 * 4;
constexpr int64_t kMostConfigBytes = 1 << 20;
constexpr int kMostConfigDepth = 16;

std::string layer_name(int l, const char* kind) { return strf("h.%d.%s", l, kind); }

// F16 is a float of 5 exponent bits: the bits moved to a float's places are off by the difference of the exponents'
// biases, 2^112, and multiplying by it is exact, for subnormal numbers as well.
float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t{h & 0x8000u} << 16, magnitude = uint32_t{h & 0x7fffu} << 13;
  const bool finite = (h & 0x7c00) != 0x7c00;
  const uint32_t bits = finite ? float_bits(bits_float(magnitude) * 0x1p112f) : magnitude | 0x7f800000u;
  return bits_float(bits | sign);
}

struct F32 {
  using Bits = uint32_t;
  static float value(Bits bits) { return bits_float(bits); }
};
struct F16 {
  using Bits = uint16_t;
  static float value(Bits bits) { return half_to_float(bits); }
};
struct BF16 {
  using Bits = uint16_t;
  static float value(Bits bits) { return bf16_bits_to_float(bits); }
};

// Element i of the data, which need not be aligned.
template <class Format>
float element(const char* data, size_t i) {
  typename Format::Bits bits;
  std::memcpy(&bits, data + i * sizeof(bits), sizeof(bits));
  return Format::value(bits);
}

template <class Format>
void read_as_is(const char* data, size_t first, size_t n, float* out) {
#pragma omp parallel for
  for (size_t i = 0; i < n; i++) out[i] = element<Format>(data, first + i);
}

// From data (columns, rows) elements of the transposed, (rows, columns): some rows of it at a time, so that each line
// and each page of memory that is touched gives all its elements at once.
template <class Format>
void read_transposed(const char* data, size_t rows, size_t columns, size_t first, size_t n, float* out) {
  constexpr size_t kRows = 64;
  const size_t end = (first + n + columns - 1) / columns;
  // The first row whose element in this column is not before element i.
  const auto row_of = [&](size_t i, size_t column) { return i > column ? (i - column + columns - 1) / columns : 0; };
#pragma omp parallel for
  for (size_t top = first / columns; top < end; top += kRows) {
    for (size_t column = 0; column < columns; column++) {
      const size_t to = std::min(top + kRows, row_of(first + n, column));
      for (size_t row = std::max(top, row_of(first, column)); row < to; row++)
        out[row * columns + column - first] = element<Format>(data, column * rows + row);
    }
  }
}

bool known_dtype(const std::string& dtype) { return dtype == "F32" || dtype == "F16" || dtype == "BF16"; }

// A small JSON object. Neither its size nor its depth can be used to take much memory.
json parse_object(const std::string& path, const std::string& where) {
  const MappedFile file(path, where);
  if (file.size() > kMostConfigBytes) {
    RUN_ERROR("%s: %lld bytes, expected a configuration of at most %lld", where.c_str(),
              static_cast<long long>(file.size()), static_cast<long long>(kMostConfigBytes));
  }
  json object;
  try {
    object = json::parse(file.data(), file.data() + file.size(), [&](int depth, json::parse_event_t, json&) {
      if (depth > kMostConfigDepth) RUN_ERROR("%s: nested deeper than %d levels", where.c_str(), kMostConfigDepth);
      return true;
    });
  } catch (const json::exception&) {  // a parse_error, or an out_of_range for a number like 1e999
    RUN_ERROR("%s: not JSON: %lld bytes, %s; expected a configuration of transformers", where.c_str(),
              static_cast<long long>(file.size()), first_bytes(file.data(), file.size()).c_str());
  }
  if (!object.is_object()) RUN_ERROR("%s: expected {, a configuration of transformers", where.c_str());
  return object;
}

}  // namespace

bool ModelFile::is_path(const std::string& model) {
  std::error_code ignored;
  return model.find('/') != std::string::npos || model.ends_with(".bin") || model.ends_with(".safetensors") ||
         std::filesystem::exists(model, ignored);
}

ModelFile::ModelFile(const std::string& path, const std::string& who) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    if (std::filesystem::exists(path + "/checkpoints", ignored))
      RUN_ERROR("%s: %s: the folder of a run, expected one of its checkpoints: .../checkpoints/step_00001000",
                who.c_str(), printable(path).c_str());
    open_safetensors(path + "/model.safetensors", who);
    check_config(path + "/config.json", who);
    return;
  }
  const std::string where = who + ": " + printable(path);
  int32_t magic = 0;
  File(path, where).read(&magic, sizeof(magic), where);
  if (magic == kBinMagic || path.ends_with(".bin")) {
    open_bin(path, where);
    return;
  }
  open_safetensors(path, who);
  const std::string config = (std::filesystem::path(path).parent_path() / "config.json").string();
  if (std::filesystem::exists(config, ignored)) check_config(config, who);
}

void ModelFile::check_sizes(int64_t file_max_T, int64_t file_V, int64_t file_L, int64_t file_C,
                            const std::string& where) {
  const auto check = [&](int64_t found, int64_t most, const char* what) {
    if (found < 1 || found > most) {
      RUN_ERROR("%s: %lld %s, expected 1 to %lld", where.c_str(), static_cast<long long>(found), what,
                static_cast<long long>(most));
    }
    return static_cast<int>(found);
  };
  max_T = check(file_max_T, kMostT, "positions");
  V = check(file_V, kMostV, "tokens in the vocabulary");
  L = check(file_L, kMostL, "layers");
  C = check(file_C, kMostC, "channels");
}

void ModelFile::open_safetensors(const std::string& path, const std::string& who) {
  const std::string where = who + ": " + printable(path);
  const Safetensors& file = safetensors_.emplace(path, where);
  const std::string prefix = file.find("transformer.wte.weight") ? "transformer." : "";
  const TensorInfo *wte = file.find(prefix + "wte.weight"), *wpe = file.find(prefix + "wpe.weight");
  for (const auto& [name, t] : {std::pair{"wte.weight", wte}, {"wpe.weight", wpe}}) {
    if (!t) RUN_ERROR("%s: no tensor %s, expected a GPT-2 by the names of Hugging Face", where.c_str(), name);
    if (t->shape.size() != 2) RUN_ERROR("%s: %s has %zu dimensions, expected 2", where.c_str(), name, t->shape.size());
  }
  int64_t layers = 0;
  while (layers <= kMostL && file.find(prefix + layer_name(static_cast<int>(layers), "ln_1.weight"))) layers++;
  check_sizes(wpe->shape[0], wte->shape[0], layers, wte->shape[1], where);
  dtype_ = wte->dtype;

  // A weight that must be there, with this shape in this program's layout. Hugging Face's Conv1D has it transposed.
  const auto add = [&](const std::string& name, int64_t rows, int64_t columns, bool transposed) {
    const TensorInfo* t = file.find(prefix + name);
    if (!t) RUN_ERROR("%s: no tensor %s", where.c_str(), (prefix + name).c_str());
    std::vector<int64_t> shape = {rows};
    if (columns) shape.insert(transposed ? shape.begin() : shape.end(), columns);
    if (t->shape != shape) {
      RUN_ERROR("%s: %s has the shape %s, expected %s by wte and wpe", where.c_str(), name.c_str(),
                json(t->shape).dump().substr(0, 80).c_str(), json(shape).dump().c_str());
    }
    if (!known_dtype(t->dtype))
      RUN_ERROR("%s: %s is %s, expected F32, F16 or BF16", where.c_str(), name.c_str(), t->dtype.c_str());
    weights_[name] = {file.data(*t), t->dtype, static_cast<size_t>(rows),
                      static_cast<size_t>(std::max<int64_t>(columns, 1)), transposed};
  };
  add("wte.weight", V, C, false);
  add("wpe.weight", max_T, C, false);
  for (int l = 0; l < L; l++)
    for (const Kind& k : kinds) add(layer_name(l, k.name), k.rows * int64_t{C}, k.columns * int64_t{C}, k.columns > 0);
  add("ln_f.weight", C, 0, false);
  add("ln_f.bias", C, 0, false);

  const auto is_mask = [&](const std::string& name) {  // older versions of transformers saved them
    for (const std::string mask : {".attn.bias", ".attn.masked_bias"})
      if (name.ends_with(mask))
        return weights_.contains(name.substr(0, name.size() - mask.size()) + ".attn.c_attn.bias");
    return false;
  };
  for (const TensorInfo& t : file.tensors()) {
    if (t.name == "lm_head.weight") {
      if (t.shape != wte->shape || t.dtype != wte->dtype ||
          std::memcmp(file.data(t), file.data(*wte), static_cast<size_t>(t.end - t.begin)) != 0) {
        RUN_ERROR("%s: lm_head.weight differs from wte.weight, expected a GPT-2 whose output projection is tied to it",
                  where.c_str());
      }
      continue;
    }
    const std::string name = t.name.starts_with(prefix) ? t.name.substr(prefix.size()) : "";
    if (!weights_.contains(name) && !is_mask(name)) {
      RUN_ERROR("%s: tensor %s belongs to no GPT-2 of %d layers", where.c_str(), in_quotes(t.name).c_str(), L);
    }
  }
}

void ModelFile::open_bin(const std::string& path, const std::string& where) {
  const MappedFile& file = bin_.emplace(path, where);
  int32_t header[256] = {};
  if (file.size() > 0) std::memcpy(header, file.data(), static_cast<size_t>(std::min(file.size(), kBinHeaderBytes)));
  if (header[0] != kBinMagic) {
    RUN_ERROR("%s: not a model of llm.c: %lld bytes, %s; expected magic %d (c6 d7 34 01)", where.c_str(),
              static_cast<long long>(file.size()), first_bytes(file.data(), file.size()).c_str(), kBinMagic);
  }
  if (file.size() < kBinHeaderBytes) {
    RUN_ERROR("%s: cut short: %lld bytes, expected a header of %lld and weights", where.c_str(),
              static_cast<long long>(file.size()), static_cast<long long>(kBinHeaderBytes));
  }
  const int32_t version = header[1], Vp = header[7];
  if (version != 3 && version != 5) {
    RUN_ERROR("%s: version %d of llm.c's models, expected 3 (fp32) or 5 (bf16)", where.c_str(), version);
  }
  check_sizes(header[2], header[3], header[4], header[6], where);
  NH = header[5];
  if (NH < 1 || C % NH != 0) {
    RUN_ERROR("%s: its header states %d heads, expected a divisor of its %d channels", where.c_str(), NH, C);
  }
  if (Vp < V || Vp > kMostV + 128) {
    RUN_ERROR("%s: its header states a padded vocabulary of %d, expected at least its %d tokens", where.c_str(), Vp, V);
  }
  dtype_ = version == 3 ? "F32" : "BF16";

  int64_t at = kBinHeaderBytes;  // wraps nothing: below 2^55 with the sizes above
  const auto add = [&](const std::string& name, int64_t rows, int64_t columns, int64_t rows_in_file) {
    columns = std::max<int64_t>(columns, 1);
    // A place beyond the end is never looked at: the size is checked below.
    weights_[name] = {at <= file.size() ? file.data() + at : nullptr, dtype_, static_cast<size_t>(rows),
                      static_cast<size_t>(columns), false};
    at += rows_in_file * columns * dtype_bytes(dtype_);
  };
  add("wte.weight", V, C, Vp);
  add("wpe.weight", max_T, C, max_T);
  for (const Kind& k : kinds)
    for (int l = 0; l < L; l++)
      add(layer_name(l, k.name), k.rows * int64_t{C}, k.columns * int64_t{C}, k.rows * int64_t{C});
  add("ln_f.weight", C, 0, C);
  add("ln_f.bias", C, 0, C);
  if (at != file.size()) {
    RUN_ERROR(
        "%s: %s: %lld bytes, but its header states %d layers, %d channels, %d positions and a padded vocabulary "
        "of %d, which makes %lld",
        where.c_str(), file.size() < at ? "cut short" : "too long", static_cast<long long>(file.size()), L, C, max_T,
        Vp, static_cast<long long>(at));
  }
}

void ModelFile::check_config(const std::string& path, const std::string& who) {
  const std::string where = who + ": " + printable(path);
  const json config = parse_object(path, where);
  if (!config.contains("model_type"))
    RUN_ERROR("%s: no model_type, expected a configuration of transformers", where.c_str());
  // Where a key is absent, transformers takes the first of these.
  const std::pair<const char*, json> allowed[] = {
      {"model_type", json::array({"gpt2"})},
      {"activation_function", json::array({"gelu_new", "gelu_pytorch_tanh"})},
      {"layer_norm_epsilon", json::array({1e-5})},
      {"n_inner", json::array({nullptr, 4 * C})},
      {"tie_word_embeddings", json::array({true})},
      {"scale_attn_weights", json::array({true})},
      {"scale_attn_by_inverse_layer_idx", json::array({false})},
      {"reorder_and_upcast_attn", json::array({false})},
      {"add_cross_attention", json::array({false})},
  };
  const std::pair<const char*, int> sizes[] = {
      {"n_layer", L}, {"n_embd", C}, {"n_positions", max_T}, {"vocab_size", V}};
  const auto found = [&](const char* key) { return in_quotes(config[key].dump()); };
  for (const auto& [key, values] : allowed) {
    if (config.contains(key) && std::find(values.begin(), values.end(), config[key]) == values.end()) {
      RUN_ERROR("%s: %s is %s, expected %s: this program computes nothing else", where.c_str(), key, found(key).c_str(),
                values.size() == 1 ? values[0].dump().c_str() : ("one of " + values.dump()).c_str());
    }
  }
  for (const auto& [key, value] : sizes) {
    if (config.contains(key) && config[key] != value)
      RUN_ERROR("%s: %s is %s, but the tensors beside it have %d", where.c_str(), key, found(key).c_str(), value);
  }
  if (!config.contains("n_head")) return;
  const json& heads = config["n_head"];
  if (!heads.is_number_unsigned() || heads < 1 || heads > C || C % heads.get<int>() != 0) {
    RUN_ERROR("%s: n_head is %s, expected a divisor of its %d channels", where.c_str(), found("n_head").c_str(), C);
  }
  NH = heads.get<int>();
}

void ModelFile::read(const std::string& name, size_t first, size_t n, float* out) const {
  const auto found = weights_.find(name);
  CHECK(found != weights_.end(), "no weight %s", name.c_str());
  const Weight& w = found->second;
  CHECK(first <= w.rows * w.columns && n <= w.rows * w.columns - first, "%s: elements %zu .. %zu of %zu", name.c_str(),
        first, first + n, w.rows * w.columns);
  const auto read = [&]<class Format>(Format) {
    if (w.transposed)
      read_transposed<Format>(w.data, w.rows, w.columns, first, n, out);
    else
      read_as_is<Format>(w.data, first, n, out);
  };
  w.dtype == "F32" ? read(F32()) : w.dtype == "F16" ? read(F16()) : read(BF16());
}
