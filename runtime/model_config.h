// The shape of the model: descriptors such as d12 or gpt3:1.3B, and the flags that override them.
#pragma once
#include <cstdint>

#include "runtime/options.h"

struct ModelConfig {
  int L = 0;      // layers
  int NH = 0;     // attention heads
  int C = 0;      // channels, a multiple of NH
  int max_T = 0;  // positions; training uses sequences of this length
  int V = 0;      // vocabulary
  int Vp = 0;     // V rounded up to a multiple of 128; the rows beyond V stay 0
};

// vocab_from_shards: the vocabulary that the shards' headers state, 0 if they state none (or none was opened).
// Throws UsageError.
ModelConfig model_config(const Options& options, int vocab_from_shards);
