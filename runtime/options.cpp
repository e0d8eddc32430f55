// The table of flags, and what is derived from it: parsing, checks, help, and the flags object of metrics.jsonl.
// A new flag is a field of Options and a row of the table.
//
// cxxopts splits the words. The checks are our own: cxxopts reads "1e-3x" as 0.001, takes "0x10" and
// stray words, and lets "--lr --steps=3" give --lr the value "--steps=3".
#include "runtime/options.h"

#include <algorithm>
#include <charconv>
#include <sstream>
#include <type_traits>
#include <variant>
#include <vector>

#define CXXOPTS_NO_REGEX true  // its regex stops at a newline in a value, and recurses once a character
#include <cxxopts.hpp>

#include "runtime/error.h"

namespace {

using Member = std::variant<bool Options::*, int Options::*, int64_t Options::*, uint64_t Options::*, double Options::*,
                            std::string Options::*>;

struct Flag {
  const char* group;
  const char* name;
  Member member;
  const char* help;
  double min = 0, max = 0;                // numbers; both ends belong to the range
  const char* unset = "";                 // the default in words, for a flag whose field starts as "not given"
  std::vector<std::string> choices = {};  // text that must be one of these; --help lists them
  bool may_be_empty = false;
};

constexpr double max_count = 1e9;  // keeps every product of two counts, such as steps * tokens, within int64_t
constexpr double max_seed = 9007199254740991;  // 2^53 - 1: exact in every reader of JSON

constexpr const char* plan_group = "Plan";

const std::vector<Flag>& flag_table() {
  using O = Options;
  static const std::vector<Flag> table = {
      {"Precision and device",
       "precision",
       &O::precision,
       "number formats of weights and optimizer",
       0,
       0,
       "",
       {"bf16", "bf16_kahan", "bf16_sr", "collage_light", "collage_plus", "fp32_optim", "fp32_master", "bf16_rem16",
        "bf16_int8", "fp32"}},
      {"Precision and device",
       "mcf",
       &O::mcf,
       "bf16, bf16_kahan and collage_*: round each operation, round only what is stored, or as the paper's code does",
       0,
       0,
       "",
       {"strict", "fused", "as-released"}},
      {"Precision and device",
       "grad-accum",
       &O::grad_accum,
       "what the gradients of micro-batches add up in, where there are several",
       0,
       0,
       "",
       {"bf16", "pair", "fp32"}},
      {"Precision and device", "switch", &O::switch_precision,
       "STEP:PRECISION, go on in another precision after so many steps", 0, 0, "never"},
      {"Precision and device",
       "device",
       &O::device,
       "auto takes a GPU if there is one",
       0,
       0,
       "",
       {"auto", "cuda", "cpu"}},
      {"Precision and device", "threads", &O::threads, "CPU threads", 1, 4096, "all"},
      {"Precision and device",
       "recompute",
       &O::recompute,
       "what backward computes again instead of keeping it: less memory, never other bits",
       0,
       0,
       "",
       {"none", "gelu", "layernorm", "block"}},

      {"Model", "model", &O::model,
       "d6, d12, d24, d36, d48, ..., gpt2:124M to 1558M, gpt3:125M to 175B; or a file of weights: transformers' folder "
       "or .safetensors, llm.c's .bin",
       0, 0, "d12 on a GPU, d6 on the CPU"},
      {"Model", "layers", &O::layers, "number of transformer blocks", 1, 4096, "the model's"},
      {"Model", "heads", &O::heads, "attention heads", 1, 4096, "the model's"},
      {"Model", "channels", &O::channels, "width, a multiple of --heads", 1, 262144, "the model's"},
      {"Model", "seq-len", &O::seq_len, "tokens in a training sequence", 1, 1048576, "the model's"},
      {"Model", "vocab-size", &O::vocab_size, "tokens in the vocabulary", 1, 16777216, "the shards', or 50257"},

      {"Data", "train-data", &O::train_data, "shards to train on, a quoted glob", 0, 0, "data/kjv/train_*.bin"},
      {"Data", "val-data", &O::val_data, "shards to validate on; none if only --train-data is given", 0, 0,
       "data/kjv/val_*.bin"},
      {"Data", "batch-size", &O::batch_size, "sequences in a micro-batch of one rank", 1, 1048576},
      {"Data", "total-batch-tokens", &O::total_batch_tokens,
       "tokens in one step; gradients of several micro-batches add up to that", 1, max_count, "one micro-batch a rank"},
      {"Data", "overfit-batch", &O::overfit_batch, "train on one batch over and over"},

      {"Training", "steps", &O::steps, "optimizer steps; 0 = one epoch", 0, max_count},
      {"Training", "lr", &O::lr, "peak learning rate", 0, 1000},
      {"Training", "warmup-steps", &O::warmup_steps, "steps of linear warm-up", 0, max_count},
      {"Training",
       "lr-schedule",
       &O::lr_schedule,
       "wsd: constant, then linear over the last 20 % of steps",
       0,
       0,
       "",
       {"cosine", "linear", "constant", "wsd"}},
      {"Training", "final-lr-frac", &O::final_lr_frac, "learning rate at the end over --lr", 0, 1},
      {"Training", "beta1", &O::beta1, "AdamW: decay of the first moment, below 1", 0, 0.9999999},
      {"Training", "beta2", &O::beta2, "AdamW: decay of the second moment, below 1", 0, 0.9999999},
      {"Training", "eps", &O::eps, "AdamW: added to the denominator, above 0", 1e-30, 1},
      {"Training", "weight-decay", &O::weight_decay, "AdamW: decoupled weight decay", 0, 1000},
      {"Training", "grad-clip", &O::grad_clip, "largest norm of the gradient; 0 = off", 0, 1e30},
      {"Training", "seed", &O::seed, "of initial weights and data order", 0, max_seed},
      {"Training", "zero", &O::zero, "1: the ranks share out the optimizer states; 0: each has all", 0, 1},
      {"Training", "max-bad-steps", &O::max_bad_steps,
       "stop after so many steps in a row without a finite loss and gradient; 0 = never", 0, max_count},
      {"Training", "skip-spikes", &O::skip_spikes,
       "skip a step whose loss or gradient norm lies so many standard deviations above the last 128; 0 = off", 0, 1e9},

      {"Validation and samples", "val-every", &O::val_every, "validate every n steps and at the end; 0 = never", 0,
       max_count},
      {"Validation and samples", "val-sequences", &O::val_sequences, "validate on the first n sequences; 0 = all", 0,
       max_count},
      {"Validation and samples", "sample-every", &O::sample_every, "print a sample every n steps; 0 = never", 0,
       max_count},
      {"Validation and samples", "sample-tokens", &O::sample_tokens, "tokens in a sample", 1, 1048576},
      {"Validation and samples", "prompt", &O::prompt, "text that a sample continues", 0, 0, "end of text", {}, true},
      {"Validation and samples", "eval-only", &O::eval_only, "validate, sample if asked, and stop"},

      {plan_group, "plan", &O::plan, "print what the run takes of memory and time at least, and stop; needs no GPU"},
      {plan_group, "gpu", &O::gpu,
       "H100, H200, B200, A100, L40S, 4090, ..., or one's memory, bandwidth and peak as <GB>,<TB/s>,<TFLOP/s>", 0, 0,
       "H100"},
      {plan_group, "plan-ranks", &O::plan_ranks, "ranks to plan for", 1, 65536, "those that run"},
      {plan_group, "plan-network", &O::plan_network, "GB/s that a rank sends, and receives", 1e-3, 1e6, "50"},

      {"Output", "out", &O::out, "run folder, for metrics.jsonl, report.html and checkpoints", 0, 0,
       "nothing is written"},
      {"Output", "checkpoint-every", &O::checkpoint_every, "save the run every n steps and at the end; 0 = never", 0,
       max_count},
      {"Output", "keep-checkpoints", &O::keep_checkpoints, "of the newest; older ones are deleted; 0 = all", 0,
       max_count},
      {"Output", "resume", &O::resume, "go on from the newest checkpoint in --out, with its flags where none is given"},
      {"Output", "edq-every", &O::edq_every, "measure the quality of the update every n steps; 0 = never", 0, max_count,
       "10 on a GPU, 1 on the CPU"},
      {"Output", "shadow", &O::shadow,
       "with it compare one weight in n with fp64 AdamW on the same gradients; 0 = none", 0, max_count,
       "0, or 1024 with --lockstep"},
      {"Output", "lockstep", &O::lockstep,
       "precisions that get the gradients of this run, each with weights of its own; compares them, trains none of "
       "them",
       0, 0, "none"},
      {"Output", "help", &O::help, "print this and stop"},
      {"Output", "version", &O::version, "print the version and stop"},
  };
  return table;
}

bool is_switch(const Flag& flag) { return std::holds_alternative<bool Options::*>(flag.member); }

// The shortest digits that read back as x.
std::string number(double x) {
  char text[32];
  std::string s(text, std::to_chars(text, text + sizeof text, x).ptr);
  if (const size_t e = s.find("e-0"); e != std::string::npos) s.erase(e + 2, 1);  // 3e-04 is 3e-4 to a reader
  return s;
}

std::string join(const std::vector<std::string>& words) {
  std::string s;
  for (const std::string& word : words) s += (s.empty() ? "" : ", ") + word;
  return s;
}

// "a whole number from 1 to 4096": what a flag's value may be.
std::string expected(const Flag& flag) {
  if (is_switch(flag)) return "true or false";
  if (!flag.choices.empty()) return "one of " + join(flag.choices);
  if (std::holds_alternative<std::string Options::*>(flag.member)) return "text";
  if (std::holds_alternative<double Options::*>(flag.member)) {
    return "a number from " + number(flag.min) + " to " + number(flag.max) + ", written like 0.001 or 1e-3";
  }
  return strf("a whole number from %.0f to %.0f, in digits only", flag.min, flag.max);
}

// Edit distance (Levenshtein), for "did you mean".
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); j++) row[j] = j;
  for (size_t i = 1; i <= a.size(); i++) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); j++) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

// "; did you mean --x?" for the candidate nearest to `word`, or `otherwise` if none is near.
std::string did_you_mean(const std::string& word, const std::vector<std::string>& candidates, const char* prefix,
                         const char* otherwise) {
  const std::string* best = nullptr;
  size_t best_distance = std::min<size_t>(4, word.size());  // a distance of the whole length is no likeness
  for (const std::string& candidate : candidates) {
    if (word.size() > candidate.size() + 4) continue;
    const size_t d = distance(word, candidate);
    if (d < best_distance) best_distance = d, best = &candidate;
  }
  return best ? std::string("; did you mean ") + prefix + *best + "?" : otherwise;
}

const Flag* find_flag(const std::string& name) {
  for (const Flag& flag : flag_table()) {
    if (name == flag.name) return &flag;
  }
  return nullptr;
}

// Finds what cxxopts would take without a word, or report in its own words: flags that do not exist, words that belong
// to no flag, and flags without their value.
void check_words(int argc, char** argv) {
  for (int i = 1; i < argc; i++) {
    const std::string word = argv[i];
    const std::string before_value = word.substr(0, word.find('='));
    const size_t dashes = std::min<size_t>(2, word.find_first_not_of('-'));
    if (dashes == 0 || word.empty() || word == "-" || word == "--") {
      USAGE_ERROR("found %s, which belongs to no flag; expected only --flag=value; quote a value that has spaces or *",
                  in_quotes(word).c_str());
    }
    const std::string name = before_value.substr(std::min(dashes, before_value.size()));
    const Flag* flag = dashes == 2 ? find_flag(name) : nullptr;
    if (!flag) {
      std::vector<std::string> names;
      for (const Flag& known : flag_table()) names.push_back(known.name);
      USAGE_ERROR("unknown flag %s%s", in_quotes(before_value).c_str(),
                  did_you_mean(name, names, "--", "; expected one of those that --help lists").c_str());
    }
    if (before_value == word && !is_switch(*flag)) {
      if (i + 1 == argc || std::string(argv[i + 1]).starts_with("--")) {
        USAGE_ERROR("--%s: found no value, expected %s; write --%s=VALUE", flag->name, expected(*flag).c_str(),
                    flag->name);
      }
      i++;  // its value
    }
  }
}

// The whole of `text` as a number within the flag's range.
template <typename Number>
Number parse_number(const Flag& flag, const std::string& text) {
  Number x = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, x);
  // Written so that NaN, for which both comparisons are false, is out of range.
  const bool in_range = static_cast<double>(x) >= flag.min && static_cast<double>(x) <= flag.max;
  if (error != std::errc() || stop != end || !in_range) {
    USAGE_ERROR("--%s: found %s, expected %s", flag.name, in_quotes(text).c_str(), expected(flag).c_str());
  }
  return x;
}

void set_value(Options& options, const Flag& flag, const std::string& text) {
  if (text.empty() && !flag.may_be_empty) {
    USAGE_ERROR("--%s: found an empty value, expected %s; leave the flag out for its default", flag.name,
                expected(flag).c_str());
  }
  std::visit(
      [&](auto member) {
        using Value = std::remove_reference_t<decltype(options.*member)>;
        if constexpr (std::is_same_v<Value, std::string>) {
          const auto& choices = flag.choices;
          if (!choices.empty() && std::find(choices.begin(), choices.end(), text) == choices.end()) {
            USAGE_ERROR("--%s: found %s, expected %s%s", flag.name, in_quotes(text).c_str(), expected(flag).c_str(),
                        did_you_mean(text, choices, "", "").c_str());
          }
          options.*member = text;
        } else if constexpr (std::is_same_v<Value, bool>) {
          if (text != "true" && text != "false") {
            USAGE_ERROR("--%s: found %s, expected %s; --%s alone means true", flag.name, in_quotes(text).c_str(),
                        expected(flag).c_str(), flag.name);
          }
          options.*member = text == "true";
        } else {
          options.*member = parse_number<Value>(flag, text);
        }
      },
      flag.member);
}

// A flag's value, written as one would give it; "" where it has none.
std::string value_text(const Options& options, const Flag& flag) {
  return std::visit(
      [&](auto member) -> std::string {
        const auto& value = options.*member;
        using Value = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<Value, std::string>)
          return value;
        else if constexpr (std::is_same_v<Value, double>)
          return number(value);
        else if constexpr (std::is_same_v<Value, bool>)
          return value ? "true" : "false";
        else  // a field that is still "not given" lies outside its flag's range
          return static_cast<double>(value) >= flag.min ? std::to_string(value) : "";
      },
      flag.member);
}

// The default as --help shows it.
std::string default_text(const Flag& flag) {
  if (*flag.unset) return flag.unset;
  static const Options defaults;
  return is_switch(flag) ? "" : value_text(defaults, flag);
}

// What --resume makes of a flag that differs from the checkpoint's. It may, unless the flag is in one of these.
constexpr const char* of_the_process[] = {"out", "resume", "device", "threads", "help", "version", "eval-only"};
constexpr const char* of_the_run[] = {
    "model",         "layers",  "heads",      "channels", "seq-len", "vocab-size", "total-batch-tokens",
    "overfit-batch", "seed",    "grad-accum", "beta1",    "beta2",   "eps",        "switch",
    "shadow",        "lockstep"};
template <size_t n>
bool is_one_of(const char* name, const char* const (&names)[n]) {
  return std::any_of(names, names + n, [&](const char* other) { return std::string(name) == other; });
}

// Splits the words of a checked command line into flags and values, in their order.
std::vector<std::pair<const Flag*, std::string>> split(int argc, char** argv) {
  cxxopts::Options parser("train_gpt");
  for (const Flag& flag : flag_table()) {
    const auto value = cxxopts::value<std::string>();
    if (is_switch(flag)) value->implicit_value("true");
    parser.add_options()(flag.name, flag.help, value);
  }
  std::vector<std::pair<const Flag*, std::string>> values;
  try {
    const cxxopts::ParseResult result = parser.parse(argc, argv);
    for (const auto& argument : result.arguments()) values.push_back({find_flag(argument.key()), argument.value()});
  } catch (const std::exception& error) {
    USAGE_ERROR("%s; see --help", in_quotes(error.what()).c_str());
  }
  return values;
}

}  // namespace

Options parse_options(int argc, char** argv) {
  Options options;
  if (argc < 2) return options;  // with no program name either, cxxopts would read past the end
  for (int i = 1; i < argc; i++) {
    // Help is wanted most where the rest of the line is wrong.
    if (std::string(argv[i]) == "--help" || std::string(argv[i]) == "-h") {
      options.help = true;
      return options;
    }
  }
  check_words(argc, argv);
  for (const auto& [flag, text] : split(argc, argv)) {
    set_value(options, *flag, text);
    options.given.push_back(flag->name);
  }

  if (options.eval_only && options.val_data.empty() && !options.train_data.empty()) {
    USAGE_ERROR("--eval-only: found --train-data without --val-data, expected shards to validate on; add --val-data");
  }
  if (options.out.empty() && (options.resume || options.checkpoint_every))
    USAGE_ERROR("--%s: found without --out, expected the run folder that has the checkpoints; add --out",
                options.resume ? "resume" : "checkpoint-every");
  if (options.resume && options.eval_only)
    USAGE_ERROR("--eval-only: found with --resume; to evaluate a checkpoint give its folder to --model");
  if (!options.plan) {
    const char* given = !options.gpu.empty()   ? "gpu"
                        : options.plan_ranks   ? "plan-ranks"
                        : options.plan_network ? "plan-network"
                                               : nullptr;
    if (given)
      USAGE_ERROR("--%s: found without --plan, expected with it: a run takes what is there; add --plan", given);
  }
  return options;
}

std::string help_text() {
  std::string help =
      "Trains GPT models in the number formats of your choice, and logs what each of them loses.\n\n"
      "  ./train_gpt --precision=collage_plus --out=runs/plus\n"
      "  ./train_gpt --precision=bf16 --train-data='mine/train_*.bin' --val-data='mine/val_*.bin' \\\n"
      "      --model=d12 --seq-len=512 --batch-size=8 --steps=1000 --lr=6e-4 --warmup-steps=100\n\n"
      "In brackets: the default. A repeated flag: the last wins.\n";
  constexpr size_t help_column = 28, columns = 98;
  std::string group;
  for (const Flag& flag : flag_table()) {
    if (group != flag.group) help += strf("\n%s\n", flag.group), group = flag.group;
    std::string text = flag.choices.empty() ? flag.help : join(flag.choices) + "; " + flag.help;
    if (const std::string value = default_text(flag); !value.empty()) text += " [" + value + "]";

    std::string line = std::string("  --") + flag.name;
    if (!is_switch(flag)) line += std::holds_alternative<std::string Options::*>(flag.member) ? "=TEXT" : "=N";
    line.resize(std::max(line.size() + 1, help_column), ' ');
    std::istringstream words(text);
    for (std::string word; words >> word; line += word + " ") {
      if (line.size() + word.size() > columns) {
        line.back() = '\n';
        help += line;
        line = std::string(help_column, ' ');
      }
    }
    line.back() = '\n';
    help += line;
  }
  return help;
}

const char* version() {
#ifdef TRAIN_GPT_VERSION
  return TRAIN_GPT_VERSION;
#else
  return "unknown";
#endif
}

std::string command_line(int argc, char** argv) {
  std::string line;
  for (int i = 0; i < argc; i++) {
    const std::string word = argv[i];
    const char* plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./,:@%";
    if (i > 0) line += ' ';
    if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) {
      line += word;
      continue;
    }
    line += '\'';
    for (char c : word) line += c == '\'' ? std::string("'\\''") : std::string(1, c);
    line += '\'';
  }
  return line;
}

Record flag_values(const Options& options) {
  Record record;
  for (const Flag& flag : flag_table()) {
    if (flag.member == Member(&Options::help) || flag.member == Member(&Options::version)) continue;
    if (flag.group == plan_group) continue;  // no part of a run
    std::visit(
        [&](auto member) {
          const auto& value = options.*member;
          using Value = std::decay_t<decltype(value)>;
          if constexpr (std::is_same_v<Value, std::string>) {
            if (!value.empty()) record.add(flag.name, value);
          } else if constexpr (std::is_integral_v<Value> && !std::is_same_v<Value, bool>) {
            // A field that is still "not given" lies outside its flag's range.
            if (static_cast<double>(value) >= flag.min) record.add(flag.name, value);
          } else {
            record.add(flag.name, value);
          }
        },
        flag.member);
  }
  return record;
}

bool Options::is_given(const std::string& flag) const {
  return std::find(given.begin(), given.end(), flag) != given.end();
}

FlagTexts flag_texts(const Options& options) {
  FlagTexts texts;
  for (const Flag& flag : flag_table()) {
    if (flag.group == plan_group || is_one_of(flag.name, of_the_process)) continue;
    if (const std::string text = value_text(options, flag); !text.empty()) texts.push_back({flag.name, text});
  }
  return texts;
}

std::vector<std::string> take_flags(Options& options, const FlagTexts& saved, const std::string& who) {
  const Options asked = options;
  const auto set_saved = [&](Options& into, const Flag& flag, const std::string& text) {
    try {
      set_value(into, flag, text);
    } catch (const UsageError& error) {
      RUN_ERROR("%s: %s", who.c_str(), error.what());
    }
  };
  Options before;
  for (const auto& [name, text] : saved) {
    const Flag* flag = find_flag(name);
    if (!flag || flag->group == plan_group || is_one_of(name.c_str(), of_the_process))
      RUN_ERROR("%s: found the flag %s, which this version has not", who.c_str(), in_quotes(name).c_str());
    set_saved(before, *flag, text);
    if (!options.is_given(name)) set_saved(options, *flag, text);
  }
  std::vector<std::string> changes;
  for (const std::string& name : asked.given) {
    const Flag* flag = find_flag(name);
    if (is_one_of(flag->name, of_the_process)) continue;
    const std::string was = value_text(before, *flag), is = value_text(asked, *flag);
    if (was == is) continue;
    const std::string both = strf("--%s: found %s, the checkpoint was made with %s", flag->name, in_quotes(is).c_str(),
                                  was.empty() ? "none" : in_quotes(was).c_str());
    if (is_one_of(flag->name, of_the_run))
      USAGE_ERROR("%s; leave the flag out, or start another run in another --out", both.c_str());
    // A micro-batch of another size makes the same batch only if that is meant to stay.
    if (flag->member == Member(&Options::batch_size) && !options.is_given("total-batch-tokens"))
      USAGE_ERROR("%s; to change the micro-batch and not the batch, add --total-batch-tokens=%lld", both.c_str(),
                  static_cast<long long>(before.total_batch_tokens));
    changes.push_back(strf("--%s %s -> %s", flag->name, was.empty() ? "none" : was.c_str(), is.c_str()));
  }
  return changes;
}

std::string in_quotes(const std::string& text) {
  std::string s = "'";
  for (char c : text.substr(0, 80)) s += static_cast<unsigned char>(c) < ' ' || c == 127 ? '?' : c;
  return s + (text.size() > 80 ? "...'" : "'");
}
