#include "dataloader/data.h"

#include <filesystem>

#include "runtime/error.h"
#include "runtime/terminal.h"

std::vector<std::string> Data::in_both() const {
  std::vector<std::string> paths;
  for (int64_t i = 0; train && val && i < val->shards(); i++)
    for (int64_t j = 0; j < train->shards(); j++)
      if (std::filesystem::equivalent(val->path(i), train->path(j))) paths.push_back(val->path(i));
  return paths;
}

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
  const Dataset& first = data.first();
  if (const std::string path = first.tokenizer_path(); !path.empty()) {
    data.tokenizer.emplace(path);
    data.tokenizer->require_made(first.vocab_size(), first.tokenizer_crc(), data.train ? "--train-data" : "--val-data");
  }
  return data;
}

std::vector<int32_t> prompt_tokens(const Options& o, const Data& data, int V) {
  if (o.prompt.empty()) return {data.eot(V)};
  if (!data.tokenizer) USAGE_ERROR("--prompt: there is no tokenizer.bin beside the shards to encode it with");
  return data.tokenizer->encode(o.prompt);
}

std::string describe(const Dataset& data) {
  return strf("%s tokens in %s shard%s, %s sequences (%s tail tokens never seen)", human_count(data.tokens()).c_str(),
              human_count(data.shards()).c_str(), data.shards() == 1 ? "" : "s", human_count(data.sequences()).c_str(),
              human_count(data.dropped_tokens()).c_str());
}
