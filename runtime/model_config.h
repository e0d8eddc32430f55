// The shape of the model: descriptors such as d12 or gpt3:1.3B, and the flags that override them; or that of a file.
#pragma once
#include <cstdint>
#include <optional>

#include "runtime/model_file.h"
#include "runtime/options.h"

struct ModelConfig {
  int L = 0;      // layers
  int NH = 0;     // attention heads
  int C = 0;      // channels, a multiple of NH
  int max_T = 0;  // positions; training uses sequences of this length
  int V = 0;      // vocabulary
  int Vp = 0;     // V rounded up to a multiple of 128; the rows beyond V stay 0
};

// The file that --model names; nothing where it is a descriptor, or not given. Throws RunError as ModelFile does.
std::optional<ModelFile> model_file(const Options& options);

// vocab_from_shards: the vocabulary that the shards' headers state, 0 if they state none (or none was opened).
// file: what model_file() gave. Its shape is the model's, but for --seq-len, which may leave positions out.
// Throws UsageError.
ModelConfig model_config(const Options& options, int vocab_from_shards, const std::optional<ModelFile>& file = {});
