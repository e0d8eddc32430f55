// The command line: defaults, every kind of bad value, and what the metrics header says of the flags.
#include "runtime/options.h"

#include <gtest/gtest.h>

#include <sstream>

#include "runtime/error.h"

namespace {

Options parse(std::vector<std::string> words) {
  words.insert(words.begin(), "train_gpt");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  return parse_options(static_cast<int>(argv.size()), argv.data());
}

// The message of the usage error that these words end in; "" if they are accepted.
std::string error_of(const std::vector<std::string>& words) {
  try {
    parse(words);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Each must be refused with one short line that holds `part`.
void expect_refused(const std::vector<std::string>& words, const std::string& part) {
  const std::string message = error_of(words);
  EXPECT_TRUE(contains(message, part)) << "message: " << message << "\nexpected in it: " << part;
  EXPECT_FALSE(contains(message, "\n")) << message;
  EXPECT_LT(message.size(), 300u) << message;
}

const std::vector<std::string> whole_numbers = {"threads",
                                                "layers",
                                                "heads",
                                                "channels",
                                                "seq-len",
                                                "vocab-size",
                                                "batch-size",
                                                "total-batch-tokens",
                                                "steps",
                                                "warmup-steps",
                                                "seed",
                                                "val-every",
                                                "val-sequences",
                                                "sample-every",
                                                "sample-tokens",
                                                "edq-every",
                                                "plan-ranks",
                                                "checkpoint-every",
                                                "keep-checkpoints",
                                                "max-bad-steps"};
const std::vector<std::string> real_numbers = {"lr",           "final-lr-frac", "beta1",        "beta2",      "eps",
                                               "weight-decay", "grad-clip",     "plan-network", "skip-spikes"};

}  // namespace

TEST(Options, DefaultsAreThoseOfTheContract) {
  const Options o = parse({});
  EXPECT_EQ(o.precision, "collage_plus");
  EXPECT_EQ(o.device, "auto");
  EXPECT_EQ(o.batch_size, 4);
  EXPECT_EQ(o.steps, 0);
  EXPECT_EQ(o.lr, 3e-4);
  EXPECT_EQ(o.warmup_steps, 0);
  EXPECT_EQ(o.lr_schedule, "cosine");
  EXPECT_EQ(o.final_lr_frac, 0.1);
  EXPECT_EQ(o.beta1, 0.9);
  EXPECT_EQ(o.beta2, 0.95);
  EXPECT_EQ(o.eps, 1e-8);
  EXPECT_EQ(o.weight_decay, 0.1);
  EXPECT_EQ(o.grad_clip, 1.0);
  EXPECT_EQ(o.val_every, 100);
  EXPECT_EQ(o.val_sequences, 80);
  EXPECT_EQ(o.sample_every, 0);
  EXPECT_EQ(o.sample_tokens, 128);
  EXPECT_EQ(o.seed, 1337u);
  EXPECT_EQ(o.checkpoint_every, 0);
  EXPECT_EQ(o.keep_checkpoints, 2);
  EXPECT_EQ(o.max_bad_steps, 5);
  EXPECT_EQ(o.skip_spikes, 0);
  EXPECT_FALSE(o.resume || o.eval_only || o.overfit_batch || o.plan || o.help || o.version);
  // Not given.
  EXPECT_EQ(o.threads + o.layers + o.heads + o.channels + o.seq_len + o.vocab_size, 0);
  EXPECT_EQ(o.total_batch_tokens, 0);
  EXPECT_EQ(o.edq_every, -1);
  EXPECT_EQ(o.plan_ranks + o.plan_network, 0);
  EXPECT_EQ(o.gpu + o.model + o.train_data + o.val_data + o.out + o.prompt, "");
}

TEST(Options, ReadsEveryFlag) {
  const Options o = parse({"--precision=bf16",
                           "--device=cpu",
                           "--threads=2",
                           "--model=d12",
                           "--layers=3",
                           "--heads=4",
                           "--channels=64",
                           "--seq-len=32",
                           "--vocab-size=257",
                           "--train-data=a*.bin",
                           "--val-data=b*.bin",
                           "--batch-size=7",
                           "--total-batch-tokens=448",
                           "--steps=9",
                           "--lr=1e-3",
                           "--warmup-steps=2",
                           "--lr-schedule=wsd",
                           "--final-lr-frac=0.5",
                           "--beta1=0.8",
                           "--beta2=.999",
                           "--eps=1e-6",
                           "--weight-decay=0",
                           "--grad-clip=0",
                           "--val-every=0",
                           "--val-sequences=0",
                           "--sample-every=5",
                           "--sample-tokens=6",
                           "--prompt=In the",
                           "--eval-only",
                           "--edq-every=0",
                           "--out=r",
                           "--seed=0",
                           "--overfit-batch"});
  EXPECT_EQ(o.precision + o.device + o.model + o.train_data + o.val_data + o.lr_schedule + o.prompt + o.out,
            "bf16cpud12a*.binb*.binwsdIn ther");
  EXPECT_EQ(o.threads, 2);
  EXPECT_EQ(o.layers, 3);
  EXPECT_EQ(o.heads, 4);
  EXPECT_EQ(o.channels, 64);
  EXPECT_EQ(o.seq_len, 32);
  EXPECT_EQ(o.vocab_size, 257);
  EXPECT_EQ(o.batch_size, 7);
  EXPECT_EQ(o.total_batch_tokens, 448);
  EXPECT_EQ(o.steps, 9);
  EXPECT_EQ(o.lr, 1e-3);
  EXPECT_EQ(o.warmup_steps, 2);
  EXPECT_EQ(o.final_lr_frac, 0.5);
  EXPECT_EQ(o.beta1, 0.8);
  EXPECT_EQ(o.beta2, 0.999);
  EXPECT_EQ(o.eps, 1e-6);
  EXPECT_EQ(o.weight_decay + o.grad_clip, 0);
  EXPECT_EQ(o.val_every + o.val_sequences + o.edq_every, 0);
  EXPECT_EQ(o.sample_every, 5);
  EXPECT_EQ(o.sample_tokens, 6);
  EXPECT_EQ(o.seed, 0u);
  EXPECT_TRUE(o.eval_only && o.overfit_batch);
}

TEST(Options, TheLastOfARepeatedFlagWins) {
  EXPECT_EQ(parse({"--lr=1", "--steps=3", "--lr", "2"}).lr, 2);
  EXPECT_FALSE(parse({"--overfit-batch", "--overfit-batch=false"}).overfit_batch);
  EXPECT_TRUE(parse({"--overfit-batch=false", "--overfit-batch=true"}).overfit_batch);
  expect_refused({"--lr=x", "--lr=2"}, "--lr: found 'x'");  // an earlier one is still checked
}

TEST(Options, NumbersAreReadWhole) {
  const std::vector<std::string> bad = {"",    " ",    " 1",   "1 ", "+1", "abc",  "0x10",     "1x",    "1,5",  "nan",
                                        "inf", "-inf", "-nan", "-1", "--", "1\n2", "infinity", "1e999", "1e-3x"};
  for (const auto* names : {&whole_numbers, &real_numbers}) {
    for (const std::string& name : *names) {
      for (const std::string& value : bad) expect_refused({"--" + name + "=" + value}, "--" + name + ": found ");
    }
  }
  for (const std::string& name : whole_numbers) {
    for (const char* value : {"1.5", "1e3", "1.", "9223372036854775808", "99999999999999999999999"}) {
      expect_refused({"--" + name + "=" + value}, "--" + name + ": found ");
    }
  }
}

TEST(Options, RangesHoldTheirEndsAndNoMore) {
  for (const char* word : {"--batch-size=1", "--batch-size=1048576", "--beta1=0", "--beta2=0", "--beta2=0.9999999",
                           "--lr=0", "--eps=1e-30", "--final-lr-frac=1", "--weight-decay=0", "--seed=9007199254740991",
                           "--vocab-size=1", "--steps=1000000000", "--total-batch-tokens=1000000000"}) {
    EXPECT_EQ(error_of({word}), "");
  }
  for (const char* word : {"--batch-size=0",     "--batch-size=1048577", "--beta1=1",         "--beta2=1",
                           "--beta2=0.99999999", "--lr=-1e-9",           "--lr=1001",         "--eps=0",
                           "--eps=1e-300",       "--final-lr-frac=1.01", "--threads=0",       "--seed=9007199254740992",
                           "--seed=-1",          "--vocab-size=0",       "--seq-len=0",       "--layers=0",
                           "--heads=0",          "--channels=0",         "--sample-tokens=0", "--total-batch-tokens=0",
                           "--steps=1000000001", "--val-every=-1",       "--edq-every=-1",    "--grad-clip=-1"}) {
    expect_refused({word}, ": found ");
  }
  // What passes as a beta is below 1 in single precision too, where the optimizer works.
  EXPECT_LT(static_cast<float>(parse({"--beta2=0.9999999"}).beta2), 1.0f);
  EXPECT_GT(static_cast<float>(parse({"--eps=1e-30"}).eps), 0.0f);
}

TEST(Options, MissingAndEmptyValues) {
  expect_refused({"--lr"}, "--lr: found no value, expected a number");
  expect_refused({"--lr", "--steps=3"}, "--lr: found no value");
  expect_refused({"--out", "--steps=3"}, "--out: found no value");
  expect_refused({"--prompt", "--out=x"}, "--prompt: found no value");
  expect_refused({"--out="}, "--out: found an empty value");
  expect_refused({"--precision="}, "--precision: found an empty value");
  EXPECT_EQ(error_of({"--prompt="}), "");  // an empty prompt is the default: it starts from end-of-text
  EXPECT_EQ(parse({"--prompt=--out=x"}).prompt, "--out=x");
  EXPECT_EQ(parse({"--prompt=a\nb"}).prompt, "a\nb");
  EXPECT_EQ(parse({"--prompt=" + std::string(100000, 'x')}).prompt.size(), 100000u);
}

TEST(Options, WordsThatAreNoFlag) {
  for (const char* word : {"foo", "-", "--", "", "3", "=", "data/*.bin"}) expect_refused({word}, "belongs to no flag");
  expect_refused({"--eval-only", "false"}, "found 'false', which belongs to no flag");
  expect_refused({"--steps=3", "4"}, "found '4'");
}

TEST(Options, UnknownFlagsNameTheNearest) {
  expect_refused({"--batch_size=3"}, "unknown flag '--batch_size'; did you mean --batch-size?");
  expect_refused({"--learning-rat=3"}, "unknown flag '--learning-rat'");
  expect_refused({"--precison=bf16"}, "did you mean --precision?");
  expect_refused({"-lr=3"}, "unknown flag '-lr'; did you mean --lr?");
  expect_refused({"--xyzzy=1"}, "--help");
  for (const char* word : {"-x", "-s3", "--=3", "---lr=1", "--l", "--\xc3\xa9=1", "-lr"}) {
    expect_refused({word}, "unknown flag");
  }
  expect_refused({"--" + std::string(100000, 'x')}, "unknown flag");
}

TEST(Options, ChoicesAreListed) {
  expect_refused({"--precision=bf15"}, "expected one of bf16, bf16_kahan, bf16_sr, collage_light, collage_plus, ");
  expect_refused({"--precision=BF16"}, "--precision: found 'BF16'");
  expect_refused({"--device=gpu"}, "--device: found 'gpu', expected one of auto, cuda, cpu");
  expect_refused({"--lr-schedule=cosin"}, "did you mean cosine?");
  expect_refused({"--eval-only=yes"}, "--eval-only: found 'yes', expected true or false");
  expect_refused({"--overfit-batch="}, "--overfit-batch: found an empty value");
}

TEST(Options, EvalOnlyNeedsShardsToValidateOn) {
  expect_refused({"--eval-only", "--train-data=x"}, "--eval-only: found --train-data without --val-data");
  EXPECT_EQ(error_of({"--eval-only", "--val-data=x"}), "");
  EXPECT_EQ(error_of({"--eval-only"}), "");
}

TEST(Options, ThePlansFlagsNeedThePlan) {
  const Options o = parse({"--plan", "--gpu=H200", "--plan-ranks=8", "--plan-network=12.5"});
  EXPECT_TRUE(o.plan);
  EXPECT_EQ(o.gpu, "H200");
  EXPECT_EQ(o.plan_ranks, 8);
  EXPECT_EQ(o.plan_network, 12.5);
  for (const char* word : {"--gpu=H200", "--plan-ranks=8", "--plan-network=12.5"})
    expect_refused({word}, "found without --plan");
  for (const char* word : {"--plan-ranks=0", "--plan-ranks=65537", "--plan-network=0", "--gpu="})
    expect_refused({"--plan", word}, ": found ");
}

TEST(Options, HelpHoldsEveryFlagWithinAHundredColumns) {
  std::istringstream help(help_text());
  for (std::string line; std::getline(help, line);) EXPECT_LT(line.size(), 100u) << line;
  for (const auto* names : {&whole_numbers, &real_numbers}) {
    for (const std::string& name : *names) EXPECT_TRUE(contains(help_text(), "  --" + name + "=N")) << name;
  }
  EXPECT_TRUE(contains(help_text(), "[collage_plus]"));
  EXPECT_TRUE(contains(help_text(), "[3e-4]"));
  EXPECT_TRUE(parse({"--help"}).help);
  EXPECT_TRUE(parse({"--nonsense", "-h"}).help);
  EXPECT_TRUE(parse({"--version"}).version);
  EXPECT_STRNE(version(), "");
}

TEST(Options, CommandLineIsQuotedForAShell) {
  std::vector<std::string> words = {"./train_gpt", "--lr=1e-3", "--train-data=data/*.bin", "--prompt=it's", "", "a b"};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  EXPECT_EQ(command_line(static_cast<int>(argv.size()), argv.data()),
            "./train_gpt --lr=1e-3 '--train-data=data/*.bin' '--prompt=it'\\''s' '' 'a b'");
}

TEST(Options, FlagValuesAreThoseInEffect) {
  const auto value_of = [](const Record& record, const std::string& key) -> const Record::Field* {
    for (const auto& field : record.fields) {
      if (field.key == key) return &field;
    }
    return nullptr;
  };
  const Record record = flag_values(parse({"--lr=2", "--steps=7", "--eval-only"}));
  EXPECT_EQ(record.fields.at(0).key, "precision");
  EXPECT_EQ(std::get<double>(value_of(record, "lr")->value), 2.0);
  EXPECT_EQ(std::get<int64_t>(value_of(record, "steps")->value), 7);
  EXPECT_EQ(std::get<bool>(value_of(record, "eval-only")->value), true);
  EXPECT_EQ(std::get<bool>(value_of(record, "overfit-batch")->value), false);
  EXPECT_EQ(std::get<std::string>(value_of(record, "precision")->value), "collage_plus");
  for (const char* not_given :
       {"threads", "layers", "vocab-size", "model", "out", "edq-every", "help", "plan", "gpu"}) {
    EXPECT_EQ(value_of(record, not_given), nullptr) << not_given;
  }
  Options options;
  options.edq_every = 0;
  EXPECT_NE(value_of(flag_values(options), "edq-every"), nullptr);  // 0 is a value: never
}

TEST(Options, AResumedRunTakesWhatIsNotGiven) {
  Options saved = parse({"--lr=1e-3", "--steps=100", "--batch-size=2", "--seed=5", "--prompt=a b", "--beta2=.99"});
  saved.total_batch_tokens = 64, saved.seq_len = 16;
  const FlagTexts texts = flag_texts(saved);
  for (const auto& [name, text] : texts) EXPECT_TRUE(name != "out" && name != "resume" && name != "threads") << name;

  Options o = parse({"--out=x", "--resume", "--steps=200", "--threads=3", "--beta2=0.99"});
  EXPECT_EQ(take_flags(o, texts, "test"), std::vector<std::string>{"--steps 100 -> 200"});
  EXPECT_EQ(o.lr, 1e-3);
  EXPECT_EQ(o.steps, 200);
  EXPECT_EQ(o.seed, 5u);
  EXPECT_EQ(o.threads, 3);
  EXPECT_EQ(o.total_batch_tokens, 64);
  EXPECT_EQ(o.prompt, "a b");

  const auto refused = [&](std::vector<std::string> words) {
    words.insert(words.end(), {"--out=x", "--resume"});
    Options other = parse(words);
    try {
      take_flags(other, texts, "test");
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_TRUE(contains(refused({"--seed=6"}), "--seed: found '6', the checkpoint was made with '5'"))
      << refused({"--seed=6"});
  EXPECT_TRUE(contains(refused({"--lockstep=bf16"}), "made with none"));
  // A micro-batch of another size makes the same batch, if that is what is meant.
  EXPECT_TRUE(contains(refused({"--batch-size=4"}), "add --total-batch-tokens=64"));
  EXPECT_EQ(refused({"--batch-size=4", "--total-batch-tokens=64"}), "");
  EXPECT_TRUE(contains(refused({"--batch-size=4", "--total-batch-tokens=128"}), "--total-batch-tokens: found '128'"));
}

TEST(Options, ACheckpointsFlagsAreChecked) {
  for (const FlagTexts& bad : {FlagTexts{{"steps", "-1"}},
                               {{"steps", ""}},
                               {{"steps", "1e99"}},
                               {{"nothing", "1"}},
                               {{"precision", "fp8"}},
                               {{"out", "elsewhere"}},
                               {{"gpu", "H100"}}}) {
    Options o;
    EXPECT_THROW(take_flags(o, bad, "test"), RunError) << bad[0].first;
  }
}

TEST(Options, ResumeAndCheckpointsNeedAFolder) {
  expect_refused({"--resume"}, "--resume: found without --out");
  expect_refused({"--checkpoint-every=5"}, "--checkpoint-every: found without --out");
  expect_refused({"--resume", "--out=x", "--eval-only"}, "--eval-only: found with --resume");
}
