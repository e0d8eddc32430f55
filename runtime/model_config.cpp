// Descriptors are llm.c's: d<depth> scales GPT-2 with the width of its published sizes, gpt2: and gpt3: name the
// published sizes themselves.
#include "runtime/model_config.h"

#include <string>

#include "runtime/error.h"

namespace {

struct Shape {
  const char* name;
  int L, C, NH, max_T;
};

constexpr Shape shapes[] = {
    {"d6", 6, 384, 6, 1024},           {"d12", 12, 768, 12, 1024},        {"d24", 24, 1024, 16, 1024},
    {"d36", 36, 1280, 20, 1024},       {"d48", 48, 1600, 25, 1024},       {"d60", 60, 1920, 30, 1024},
    {"d72", 72, 2880, 30, 1024},       {"d84", 84, 3456, 36, 1024},       {"gpt2:124M", 12, 768, 12, 1024},
    {"gpt2:350M", 24, 1024, 16, 1024}, {"gpt2:774M", 36, 1280, 20, 1024}, {"gpt2:1558M", 48, 1600, 25, 1024},
    {"gpt3:125M", 12, 768, 12, 2048},  {"gpt3:350M", 24, 1024, 16, 2048}, {"gpt3:760M", 24, 1536, 16, 2048},
    {"gpt3:1.3B", 24, 2048, 16, 2048}, {"gpt3:2.7B", 32, 2560, 32, 2048}, {"gpt3:6.7B", 32, 4096, 32, 2048},
    {"gpt3:13B", 40, 5120, 40, 2048},  {"gpt3:30B", 48, 7168, 56, 2048},  {"gpt3:175B", 96, 12288, 96, 2048},
};

constexpr int gpt2_vocab = 50257;

const Shape* find_shape(const std::string& name) {
  for (const Shape& shape : shapes) {
    if (name == shape.name) return &shape;
  }
  return nullptr;
}

Shape named_shape(const std::string& name) {
  if (const Shape* shape = find_shape(name)) return *shape;
  std::string known;
  for (const Shape& shape : shapes) {
    if (!known.empty()) known += ' ';
    known += shape.name;
  }
  USAGE_ERROR("--model: found %s, expected a file, a folder, or one of %s; other sizes: --layers --heads --channels",
              in_quotes(name).c_str(), known.c_str());
}

// The shape of a file, which the flags may repeat.
Shape file_shape(const ModelFile& file, const Options& o, int vocab_from_shards) {
  const std::string name = in_quotes(o.model);
  const auto agree = [&](const char* flag, int found, int expected) {
    if (found && found != expected)
      USAGE_ERROR("--%s: found %d, but %s has %d; leave the flag out", flag, found, name.c_str(), expected);
  };
  agree("layers", o.layers, file.L);
  agree("channels", o.channels, file.C);
  agree("vocab-size", o.vocab_size, file.V);
  if (file.NH) agree("heads", o.heads, file.NH);
  if (!file.NH && !o.heads) {
    USAGE_ERROR("--heads: not given, and %s does not say; add it (GPT-2's have 64 channels each), or a config.json",
                name.c_str());
  }
  if (o.seq_len > file.max_T) {
    USAGE_ERROR("--seq-len: found %d, but %s has %d positions; expected at most as many", o.seq_len, name.c_str(),
                file.max_T);
  }
  if (vocab_from_shards > file.V) {
    USAGE_ERROR("--model: %s has a vocabulary of %d, the shards state %d; expected shards of its tokenizer",
                name.c_str(), file.V, vocab_from_shards);
  }
  return {"", file.L, file.C, file.NH, file.max_T};
}

}  // namespace

std::optional<ModelFile> model_file(const Options& options) {
  std::optional<ModelFile> file;
  if (!find_shape(options.model) && ModelFile::is_path(options.model)) file.emplace(options.model, "--model");
  return file;
}

ModelConfig model_config(const Options& options, int vocab_from_shards, const std::optional<ModelFile>& file) {
  const Shape shape =
      file ? file_shape(*file, options, vocab_from_shards) : named_shape(options.model.empty() ? "d6" : options.model);
  ModelConfig c;
  c.L = options.layers ? options.layers : shape.L;
  c.NH = options.heads ? options.heads : shape.NH;
  c.C = options.channels ? options.channels : shape.C;
  c.max_T = options.seq_len ? options.seq_len : shape.max_T;
  if (c.C % c.NH != 0) {
    USAGE_ERROR("--channels: found %d channels and %d heads, expected a multiple of the heads; set --heads as well",
                c.C, c.NH);
  }
  if (options.vocab_size && options.vocab_size < vocab_from_shards) {
    USAGE_ERROR("--vocab-size: found %d, expected at least %d, which the shards state; without the flag it is theirs",
                options.vocab_size, vocab_from_shards);
  }
  c.V = file ? file->V : options.vocab_size ? options.vocab_size : vocab_from_shards ? vocab_from_shards : gpt2_vocab;
  c.Vp = (c.V + 127) / 128 * 128;
  if (static_cast<int64_t>(options.batch_size) * c.max_T > 1'000'000'000) {
    USAGE_ERROR(
        "--batch-size: found %d sequences of %d tokens, expected at most 1000000000 tokens in all; lower it or "
        "--seq-len",
        options.batch_size, c.max_T);
  }
  return c;
}
