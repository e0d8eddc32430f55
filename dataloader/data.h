// The data of a run: what its flags name.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "dataloader/dataset.h"
#include "dataloader/tokenizer.h"
#include "runtime/options.h"

struct Data {
  std::optional<Dataset> train, val;
  std::optional<Tokenizer> tokenizer;  // tokenizer.bin beside the shards, if it is there

  const Dataset& first() const { return train ? *train : *val; }
  int eot(int V) const { return tokenizer ? tokenizer->eot() : V - 1; }  // end of text; without a file the last id
  std::vector<std::string> in_both() const;                              // shards trained on and validated on
};

// Opens the shards that the flags name, or the prepared ones where no flag does, and completes the options. Throws
// UsageError, RunError.
Data open_data(Options& options);
// What a sample continues: --prompt, or end of text. Throws UsageError.
std::vector<int32_t> prompt_tokens(const Options& options, const Data& data, int V);
// "1,234 tokens in 2 shards, ...".
std::string describe(const Dataset& data);
