// Model descriptors, their overrides, and where the vocabulary comes from.
#include "runtime/model_config.h"

#include <gtest/gtest.h>

#include <utility>

#include "dev/tests/model_files.h"
#include "runtime/error.h"

namespace {

Options model(const char* name) {
  Options options;
  options.model = name;
  return options;
}

std::string error_of(const Options& options, int vocab = 0) {
  try {
    model_config(options, vocab);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

// 12*L*C*C + 13*L*C + (V + T + 2)*C: weights and biases of GPT-2 with tied embeddings.
double parameters(const ModelConfig& c) {
  const double C = c.C;
  return c.L * (12 * C * C + 13 * C) + (c.V + c.max_T + 2) * C;
}

}  // namespace

TEST(ModelConfig, NamesMeanTheirPublishedSizes) {
  // The name's own digits against the count: 1 unit of its last digit, but 3 % for the small gpt3 models, whose names
  // come from the paper's table, and 5 % for the billions, which are rounded there.
  const struct {
    const char* name;
    double parameters, tolerance;
  } cases[] = {{"gpt2:124M", 124e6, .01},   {"gpt2:350M", 355e6, .01}, {"gpt2:774M", 774e6, .01},
               {"gpt2:1558M", 1558e6, .01}, {"gpt3:125M", 125e6, .03}, {"gpt3:350M", 356e6, .03},
               {"gpt3:760M", 760e6, .03},   {"gpt3:1.3B", 1.3e9, .05}, {"gpt3:2.7B", 2.7e9, .05},
               {"gpt3:6.7B", 6.7e9, .05},   {"gpt3:13B", 13e9, .05},   {"gpt3:30B", 30e9, .05},
               {"gpt3:175B", 175e9, .05},   {"d12", 124e6, .01},       {"d24", 355e6, .01},
               {"d36", 774e6, .01},         {"d48", 1558e6, .01}};
  for (const auto& c : cases) {
    const ModelConfig config = model_config(model(c.name), 0);
    EXPECT_NEAR(parameters(config) / c.parameters, 1, c.tolerance) << c.name;
    EXPECT_EQ(config.C % config.NH, 0) << c.name;
    EXPECT_EQ(config.max_T, std::string(c.name).starts_with("gpt3") ? 2048 : 1024) << c.name;
    EXPECT_EQ(config.V, 50257);
    EXPECT_EQ(config.Vp, 50304);
  }
}

TEST(ModelConfig, DepthsAreLlmcs) {
  const int expected[][3] = {{6, 384, 6},    {12, 768, 12},  {24, 1024, 16}, {36, 1280, 20},
                             {48, 1600, 25}, {60, 1920, 30}, {72, 2880, 30}, {84, 3456, 36}};
  for (const auto& [depth, channels, heads] : expected) {
    const ModelConfig c = model_config(model(strf("d%d", depth).c_str()), 0);
    EXPECT_EQ(c.L, depth);
    EXPECT_EQ(c.C, channels);
    EXPECT_EQ(c.NH, heads);
  }
  EXPECT_EQ(model_config(Options(), 0).L, 6);  // no flag
}

TEST(ModelConfig, FlagsOverrideTheDescriptor) {
  Options options = model("d12");
  options.layers = 2, options.heads = 3, options.channels = 96, options.seq_len = 33, options.vocab_size = 128;
  const ModelConfig c = model_config(options, 0);
  EXPECT_EQ(c.L, 2);
  EXPECT_EQ(c.NH, 3);
  EXPECT_EQ(c.C, 96);
  EXPECT_EQ(c.max_T, 33);
  EXPECT_EQ(c.V, 128);
  EXPECT_EQ(c.Vp, 128);
}

TEST(ModelConfig, VocabularyIsTheFlagThenTheShardsThenGpt2s) {
  Options options;
  EXPECT_EQ(model_config(options, 0).V, 50257);
  EXPECT_EQ(model_config(options, 257).V, 257);
  EXPECT_EQ(model_config(options, 257).Vp, 384);
  options.vocab_size = 300;
  EXPECT_EQ(model_config(options, 257).V, 300);
  options.vocab_size = 256;
  const std::string message = error_of(options, 257);
  EXPECT_NE(message.find("--vocab-size: found 256"), std::string::npos) << message;
  EXPECT_NE(message.find("257"), std::string::npos) << message;
}

TEST(ModelConfig, RefusesWhatItDoesNotKnow) {
  for (const char* name : {"d7", "d", "d06", "D12", "gpt2", "gpt2:125M", "gpt3:124M", "gpt3:1.3b", "gpt4:1T", "d12 "}) {
    const std::string message = error_of(model(name));
    EXPECT_EQ(message.find("--model: found '" + std::string(name) + "', expected a file, a folder, or one of d6 "), 0u)
        << message;
    EXPECT_NE(message.find("gpt3:175B"), std::string::npos) << message;
  }
}

TEST(ModelConfig, AFilesShapeIsTheModels) {
  TempDir dir;
  const TestModel weights;
  Options options = model((dir / "x").c_str());
  dir.write("x", TestModel::safetensors(weights.tensors("F32")));
  const std::optional<ModelFile> file = model_file(options);
  ASSERT_TRUE(file);
  const auto error = [&](int vocab = 0) { return message_of<UsageError>([&] { model_config(options, vocab, file); }); };
  EXPECT_NE(error().find("--heads: not given"), std::string::npos) << error();
  options.heads = weights.NH, options.layers = weights.L, options.channels = weights.C, options.vocab_size = weights.V;
  for (const int T : {0, 1, weights.max_T}) {
    options.seq_len = T;
    const ModelConfig c = model_config(options, weights.V, file);
    EXPECT_EQ(c.L, weights.L);
    EXPECT_EQ(c.NH, weights.NH);
    EXPECT_EQ(c.C, weights.C);
    EXPECT_EQ(c.max_T, T ? T : weights.max_T);
    EXPECT_EQ(c.V, weights.V);
    EXPECT_EQ(c.Vp, 128);
  }
  EXPECT_NE(error(12).find("has a vocabulary of 11, the shards state 12"), std::string::npos) << error(12);
  for (int Options::*flag : {&Options::layers, &Options::channels, &Options::vocab_size, &Options::seq_len}) {
    const int before = std::exchange(options.*flag, options.*flag + 1);
    EXPECT_NE(error().find(strf("found %d, but ", before + 1)), std::string::npos) << error();
    EXPECT_NE(error().find(strf(" has %d", before)), std::string::npos) << error();
    options.*flag = before;
  }
  EXPECT_FALSE(model_file(Options()));
  EXPECT_FALSE(model_file(model("d12")));
  EXPECT_FALSE(model_file(model("d7")));
}

TEST(ModelConfig, RefusesShapesThatCannotBe) {
  Options options;
  options.heads = 5;
  EXPECT_NE(error_of(options).find("--channels: found 384 channels and 5 heads"), std::string::npos);
  options = Options();
  options.batch_size = 1048576, options.seq_len = 1024;  // 2^30 tokens: past what an int holds once scaled
  EXPECT_NE(error_of(options).find("--batch-size: found 1048576"), std::string::npos);
}
