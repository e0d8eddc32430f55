// The command line: every flag with its default, checked. Reading it touches no file and no device.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "runtime/record.h"

// A field is its flag's name in snake_case. "Not given" is 0, -1 or "" as stated; the program then fills in what it
// resolved, so that flag_values() lists the values in effect.
struct Options {
  // Precision and device.
  std::string precision = "collage_plus";  // a strategy of mcf/strategies.h
  std::string mcf = "strict";              // strict, fused, as-released
  std::string grad_accum = "bf16";         // bf16, pair, fp32
  std::string switch_precision;            // "STEP:PRECISION"; "" = never
  std::string device = "auto";             // auto, cuda, cpu
  int threads = 0;                         // CPU threads; 0 = not given: all
  std::string recompute = "gelu";          // none, gelu, layernorm, block

  // Model. Resolved by model_config().
  std::string model;  // descriptor, or a file with weights; "" = not given: d12 on a GPU, d6 on the CPU
  int layers = 0;     // 0 = not given: the descriptor's. So are the next four.
  int heads = 0;
  int channels = 0;
  int seq_len = 0;     // tokens in a training sequence (T), and the number of positions of the model
  int vocab_size = 0;  // 0 = not given: what the shards state, else 50257

  // Data.
  std::string train_data;          // shard glob; "" = not given
  std::string val_data;            // shard glob; "" = not given
  int batch_size = 4;              // sequences in a micro-batch of one rank (B)
  int64_t total_batch_tokens = 0;  // tokens in one optimizer step; 0 = not given: B*T*ranks
  bool overfit_batch = false;      // train on one batch

  // Training.
  int64_t steps = 0;  // optimizer steps; 0 = one epoch
  double lr = 3e-4;
  int64_t warmup_steps = 0;
  std::string lr_schedule = "cosine";  // cosine, linear, constant, wsd
  double final_lr_frac = 0.1;          // the learning rate at the end over --lr
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  double grad_clip = 1.0;  // 0 = off
  uint64_t seed = 1337;
  int zero = 0;               // 1: each rank holds the optimizer states of its shard only
  int64_t max_bad_steps = 5;  // in a row without a finite loss and gradient; 0 = never stop
  double skip_spikes = 0;     // z-score of loss or gradient norm; 0 = off

  // Validation and samples.
  int64_t val_every = 100;     // 0 = never
  int64_t val_sequences = 80;  // 0 = all
  int64_t sample_every = 0;    // 0 = never
  int sample_tokens = 128;
  std::string prompt;  // "" = start from the end-of-text token
  bool eval_only = false;

  // Output.
  std::string out;               // run folder; "" = nothing is written
  int64_t checkpoint_every = 0;  // 0 = never
  int64_t keep_checkpoints = 2;  // 0 = all
  bool resume = false;           // from the newest checkpoint in out
  int64_t edq_every = -1;        // 0 = never; -1 = not given: 10 on a GPU, 1 on the CPU
  int64_t shadow = -1;           // one weight in so many; 0 = none; -1 = not given: 1024 with lockstep, else none
  std::string lockstep;          // precisions, separated by commas; "" = none

  // The plan: printed instead of a run.
  bool plan = false;
  std::string gpu;          // planned for: a name, or "<GB>,<TB/s>,<TFLOP/s>"; "" = not given: H100
  int plan_ranks = 0;       // 0 = not given: the ranks that run
  double plan_network = 0;  // GB/s that a rank sends, and as many that it receives; 0 = not given: 50

  bool help = false;     // print help_text() and stop
  bool version = false;  // print version() and stop

  std::vector<std::string> given;  // names of the flags on the command line
  bool is_given(const std::string& flag) const;
};

// Reads argv. Throws UsageError: one line with the flag, what was found, what was expected, and a hint.
Options parse_options(int argc, char** argv);

std::string help_text();
const char* version();

// The command, quoted for a shell where that is needed.
std::string command_line(int argc, char** argv);

// Every flag that has a value, in the order of the help, for the first line of metrics.jsonl.
Record flag_values(const Options& options);

// Names and values, as text, of the flags that describe the training: what a checkpoint keeps of them.
using FlagTexts = std::vector<std::pair<std::string, std::string>>;
FlagTexts flag_texts(const Options& options);
// --resume: flags that were not given become the checkpoint's. Returns those that change the rest of the run,
// "--steps 200 -> 400" each. Throws UsageError for one that would make another run of it, with both values, and
// RunError where the checkpoint's own flags are none. who: the checkpoint, for messages.
std::vector<std::string> take_flags(Options& options, const FlagTexts& saved, const std::string& who);

// Text from outside for an error message: in quotes, without control characters, at most 80 characters of it.
std::string in_quotes(const std::string& text);
