// bench_step: whole optimizer steps of GPT-2 124M on random tokens, set against what oneDNN reaches by itself on the
// same products. See README.md here for the flags and for how to read what it prints.
#define TRAIN_GPT_NO_MAIN
#include <fstream>

#include "dev/bench/library_peak.h"
#include "dev/bench/median.h"
#include "train_gpt.cu"

namespace {

struct Settings {
  int layers = 12, channels = 768, heads = 12, vocab = 50257, B = 4, T = 256, steps = 3, threads = 0;
  std::vector<std::string> precisions;
};

Settings parse(int argc, char** argv) {
  Settings s;
  const std::pair<const char*, int*> flags[] = {
      {"--layers=", &s.layers}, {"--channels=", &s.channels}, {"--heads=", &s.heads}, {"--vocab=", &s.vocab},
      {"--batch-size=", &s.B},  {"--seq-len=", &s.T},         {"--steps=", &s.steps}, {"--threads=", &s.threads}};
  for (int i = 1; i < argc; i++) {
    const std::string argument = argv[i];
    const auto flag =
        std::find_if(std::begin(flags), std::end(flags), [&](const auto& f) { return argument.starts_with(f.first); });
    if (flag != std::end(flags)) {
      *flag->second = std::atoi(argument.c_str() + strlen(flag->first));
    } else if (with_strategy(argument, "strict", []<class S>() {})) {
      s.precisions.push_back(argument);
    } else {
      USAGE_ERROR(
          "%s: neither a precision nor a flag; flags: --layers= --channels= --heads= --vocab= --batch-size= "
          "--seq-len= --steps= --threads=",
          argument.c_str());
    }
  }
  if (s.precisions.empty()) s.precisions = {"collage_plus", "fp32"};
  if (s.steps < 2) USAGE_ERROR("--steps=%d: the first is not counted, so 2 at least", s.steps);
  if (s.layers < 1 || s.heads < 1 || s.channels < s.heads || s.channels % s.heads || s.vocab < 1 || s.B < 1 || s.T < 1)
    USAGE_ERROR("sizes must be positive, and --channels a multiple of --heads");
  return s;
}

// Every product of a step: forward, gradient of the input, gradient of the weight.
std::vector<ProductShape> step_products(const ModelConfig& c, int BT, int chunk_rows) {
  std::vector<ProductShape> shapes;
  const auto linear = [&](int rows, int in, int out, int count) {
    shapes.push_back({rows, out, in, false, true, count});
    shapes.push_back({rows, in, out, false, false, count});
    shapes.push_back({out, in, rows, true, false, count});
  };
  linear(BT, c.C, 3 * c.C, c.L);
  linear(BT, c.C, c.C, c.L);
  linear(BT, c.C, 4 * c.C, c.L);
  linear(BT, 4 * c.C, c.C, c.L);
  linear(chunk_rows, c.C, c.Vp, std::max(1, BT / chunk_rows));
  return shapes;
}

// The bytes that a run must hold, from sizes alone.
template <class S>
std::array<int64_t, 4> memory_table(const ModelConfig& c, int64_t elements, int64_t B, int64_t T) {
  constexpr int64_t x = sizeof(typename S::Theta), state = bytes_per_parameter<S>() - 2 * x;
  const auto line = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };  // each tensor starts on a cache line
  const int64_t BT = B * T, hidden = line(BT * c.C * x), statistic = line(BT * 4);
  // ln1, atty, residual2, ln2, residual3; qkv; MLP before and after GELU; mean and rstd twice; log-sum-exp.
  const int64_t layer =
      5 * hidden + line(3 * BT * c.C * x) + 2 * line(4 * BT * c.C * x) + 4 * statistic + line(BT * c.NH * 4);
  return {elements * x, elements * x, elements * state, c.L * layer + 2 * hidden + 3 * statistic};
}

int64_t resident_anonymous_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("RssAnon:")) return std::atoll(line.c_str() + 8) * 1024;
  return 0;
}

template <class S>
bool bench(const Settings& s, Device& device) {
  using floatX = typename S::Theta;
  ModelConfig config{};
  config.L = s.layers, config.C = s.channels, config.NH = s.heads;
  config.V = s.vocab, config.Vp = (s.vocab + 127) / 128 * 128, config.max_T = s.T;
  const bool in_bf16 = sizeof(floatX) == 2 && product_native_bf16();
  const int BT = s.B * s.T;

  Workspace<floatX> plan;
  Layout nothing;
  plan.lay_out(nothing, config, s.B, s.T, Recompute::none);
  const auto shapes = step_products(config, BT, plan.chunk_rows);
  std::vector<std::vector<double>> library(shapes.size());
  const auto measure_library = [&] {
    for (int repeat = 0; repeat < 3; repeat++) {
      const auto seconds = library_seconds(shapes, in_bf16);
      for (size_t i = 0; i < seconds.size(); i++) library[i].push_back(seconds[i]);
    }
  };
  measure_library();

  GPT<floatX> model(config, s.B, s.T, Recompute::none, 1337, device);
  double norm = 0;
  auto optimizer = make_optimizer(S::name, S::mode, model.params(), model.blocks, model.table.elements, device);
  Batch batch(s.B, s.T);
  std::vector<double> walls, inside;
  double loss = 0;
  for (int step = 0; step < s.steps; step++) {
    for (int i = 0; i < BT; i++) {
      const auto id = [&](int n) { return static_cast<int>(random_uniform(7, step, n, 0) * config.V); };
      batch.tokens[static_cast<size_t>(i)] = id(i), batch.targets[static_cast<size_t>(i)] = id(i + 1);
    }
    device.profile = {};
    const double inside_before = product_seconds();
    const auto start = std::chrono::steady_clock::now();
    model.zero_gradients();
    model.forward(batch.tokens.data(), s.B, s.T);
    model.loss_and_backward(batch.tokens.data(), batch.targets.data(), 1.0f / static_cast<float>(BT), s.B, s.T,
                            [](size_t, size_t) {});
    loss = model.take_losses()[0];
    global_norm(&norm, model.grads(), model.blocks, Part(model.table.elements), [](double*) {}, device);
    const AdamWScalars k = adamw_scalars(3e-4, 0.9, 0.95, 1e-8, 0.1, 1.0, norm, step + 1);
    optimizer->update(model.params(), model.grads(), k, 1.0, &norm, true, device);
    const double wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (step == 0) continue;
    walls.push_back(wall);
    inside.push_back((product_seconds() - inside_before) / device.threads() / wall);
  }
  const int64_t resident = resident_anonymous_bytes();
  measure_library();

  const double wall = median(walls), flops = 6.0 * static_cast<double>(model.table.count) * BT / wall;
  printf("\n%s: GPT-2 with %s parameters, B = %d, T = %d, %d threads, %s\n", S::name,
         human_count(model.table.count).c_str(), s.B, s.T, device.threads(), product_library().c_str());
  printf("  step                %8.0f ms  %.0f tokens/s (median of %d; loss %.3f)\n", wall * 1e3, BT / wall,
         s.steps - 1, loss / BT);
  printf("  model FLOPs         %8.1f GFLOP/s\n", flops / 1e9);
  if (!library[0].empty()) {
    double work = 0, seconds = 0;
    for (size_t i = 0; i < shapes.size(); i++) {
      work += shapes[i].flops() * shapes[i].count;
      seconds += median(library[i]) * shapes[i].count;
    }
    printf("  oneDNN by itself    %8.1f GFLOP/s in %s on the same shapes (median of 3 before and 3 after)\n",
           work / seconds / 1e9, in_bf16 ? "bf16" : "fp32");
    printf("  ratio               %8.1f %%        target 40\n", 100 * flops / (work / seconds));
  }
  printf("  inside %-12s %8.1f %%        target 50: time in its products, of threads x step\n",
         library[0].empty() ? "plain product" : "oneDNN", 100 * median(inside));

  printf("  profile of the last step\n");
  auto rows = device.profile.rows;
  std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
  double named = 0;
  for (const auto& row : rows) {
    printf("    %-28s %5lld calls %9.1f ms %5.1f %%\n", row.operation, static_cast<long long>(row.calls),
           row.seconds * 1e3, 100 * row.seconds / walls.back());
    named += row.seconds;
  }
  printf("    %-28s %11s %9.1f ms %5.1f %%\n", "everything else", "", (walls.back() - named) * 1e3,
         100 * (1 - named / walls.back()));

  printf("  memory, bytes            allocated   by the table\n");
  const auto expected = memory_table<S>(config, static_cast<int64_t>(model.table.elements), s.B, s.T);
  bool exact = true;
  for (size_t m = 0; m < memory_names.size(); m++) {
    const int64_t bytes = device.bytes(static_cast<Memory>(m));
    const bool known = m < expected.size();
    printf("    %-14s %16lld %14s\n", memory_names[m], static_cast<long long>(bytes),
           known ? std::to_string(expected[m]).c_str() : "-");
    if (known) exact = exact && bytes == expected[m];
  }
  printf("    the table is %s\n", exact ? "exact" : "WRONG");
  printf("    %-14s %16lld\n    resident anonymous %12lld  %+.1f %% (target: within 5 %% in runs over 1 GB)\n", "sum",
         static_cast<long long>(device.bytes()), static_cast<long long>(resident),
         100.0 * (static_cast<double>(resident) / static_cast<double>(device.bytes()) - 1));
  fflush(stdout);
  return exact;
}

}  // namespace

int main(int argc, char** argv) try {
  const Settings settings = parse(argc, argv);
  bool exact = true;
  for (const auto& precision : settings.precisions) {
    Device device(settings.threads);
    with_strategy(precision, "strict", [&]<class S>() { exact = bench<S>(settings, device) && exact; });
  }
  return exact ? 0 : 1;
} catch (const std::exception& e) {
  fprintf(stderr, "bench_step: error: %s\n", e.what());
  return 2;
}
