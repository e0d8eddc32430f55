#include "runtime/plan.h"

#include <algorithm>
#include <charconv>

#include "runtime/error.h"
#include "runtime/terminal.h"

namespace {

std::string bytes_text(double bytes) { return human_bytes(bytes); }
std::string bytes_text(int64_t bytes) { return human_bytes(static_cast<double>(bytes)); }
std::string batch_text(int B) { return B ? human_count(B) : "none"; }
// Four digits, from microseconds on.
std::string time_text(double seconds) { return seconds < 1 ? strf("%.4g ms", seconds * 1e3) : strf("%.4g s", seconds); }

int64_t capacity(const Gpu& gpu) { return static_cast<int64_t>(gpu.memory_gb * 1e9); }

}  // namespace

int64_t MemoryPlan::total() const {
  int64_t sum = later;
  for (const int64_t bytes : classes) sum += bytes;
  return sum;
}

int largest_batch(Options o, const PrecisionBytes& precision, const MemoryPlanner& memory, int64_t bytes, int max_B) {
  int fits = 0;
  for (int step = 1 << 20; step > 0; step /= 2) {
    if (step > max_B - fits) continue;
    o.batch_size = fits + step;
    if (memory(o, precision).total() <= bytes) fits += step;
  }
  return fits;
}

void require_memory(const Options& o, const PrecisionBytes& precision, const MemoryPlanner& memory, int64_t free) {
  const MemoryPlan plan = memory(o, precision);
  if (plan.total() <= free) return;
  const int fits = largest_batch(o, precision, memory, free, o.batch_size - 1);
  const std::string hint = fits ? strf("the largest that fits is --batch-size=%d", fits)
                                : "no batch size fits: take a smaller --model, --recompute=block, or --zero=1";
  RUN_ERROR("--batch-size: %d needs %s of GPU memory (weights, gradients and states %s), %s are free; %s", o.batch_size,
            bytes_text(plan.total()).c_str(),
            bytes_text(plan[Memory::weights] + plan[Memory::gradients] + plan[Memory::states]).c_str(),
            bytes_text(free).c_str(), hint.c_str());
}

StepWork step_work(const Options& o, const ModelConfig& c, int64_t parameters, const PrecisionBytes& precision,
                   const MemoryPlan& memory, int64_t owned, int ranks) {
  const double L = c.L, C = c.C, T = o.seq_len, N = static_cast<double>(parameters);
  const double tokens = static_cast<double>(o.total_batch_tokens) / ranks;
  const double micro_batches = tokens / (static_cast<double>(o.batch_size) * T);
  // Causal attention: a token sees T/2 others on average, in 2 products of 2C operations each; backward takes twice
  // that.
  const double attention = 6 * L * T * C;
  // Backward with --recompute=block repeats attention and all products of a block but the last: 8 C^2 weights.
  const double repeated = o.recompute == "block" ? 16 * L * C * C + 2 * L * T * C : 0;
  const double weights = static_cast<double>(memory[Memory::weights]);
  const double gradients = static_cast<double>(memory[Memory::gradients]);  // with what they add up in

  StepWork work;
  work.flops = tokens * (6 * N + attention + repeated);
  work.layer_bytes = micro_batches * 2 * (weights + gradients + static_cast<double>(memory[Memory::activations]));
  work.optimizer_bytes = static_cast<double>(owned) * (precision.moved + precision.weight) + weights;
  work.exchanged_bytes = weights * (ranks - 1) / ranks;
  return work;
}

double StepTime::floor() const { return std::max({flops, layers, exchange}) + exchange + optimizer; }

StepTime step_time(const StepWork& work, const Gpu& gpu, bool in_bf16, double network) {
  const double bandwidth = gpu.tb_s * 1e12;
  return {work.flops / gpu.peak_flops(in_bf16), work.layer_bytes / bandwidth, work.exchanged_bytes / network,
          work.optimizer_bytes / bandwidth};
}

Gpu planned_gpu(const std::string& text) {
  for (const Gpu& gpu : known_gpus)
    if (text == gpu.name || "RTX " + text == gpu.name) return gpu;
  double numbers[3] = {};
  const char *at = text.data(), *end = at + text.size();
  for (double& x : numbers) {
    const auto [stop, error] = std::from_chars(at, end, x);
    const bool last = &x == &numbers[2];
    // Written so that NaN is refused.
    if (error != std::errc() || !(x > 0 && x < 1e6) || (last ? stop != end : stop == end || *stop != ',')) {
      std::string names;
      for (const Gpu& gpu : known_gpus) names += (names.empty() ? "" : ", ") + std::string(gpu.name);
      USAGE_ERROR("--gpu: found %s, expected one of %s; or its memory, bandwidth and peak as <GB>,<TB/s>,<TFLOP/s>",
                  in_quotes(text).c_str(), names.c_str());
    }
    at = stop + 1;
  }
  return {"GPU", numbers[2], numbers[2], numbers[0], numbers[1]};
}

Plan make_plan(const Options& o, const ModelConfig& c, int64_t parameters, int64_t owned, int ranks,
               const MemoryPlanner& memory) {
  Plan plan;
  plan.gpu = planned_gpu(o.gpu.empty() ? "H100" : o.gpu);
  plan.network = (o.plan_network > 0 ? o.plan_network : 50) * 1e9;
  plan.ranks = ranks;
  plan.step_tokens = o.total_batch_tokens;

  const auto row = [&](std::string name, const Options& with, const PrecisionBytes& precision) {
    const int max_B = static_cast<int>(1'000'000'000 / o.seq_len);  // as model_config() allows
    return Plan::Row{std::move(name), precision, memory(with, precision),
                     largest_batch(with, precision, memory, capacity(plan.gpu), max_B)};
  };
  [&]<class... S>(std::tuple<S...>*) {
    (plan.precisions.push_back(row(S::name, o, precision_bytes<S>())), ...);
  }(static_cast<Strategies*>(nullptr));
  for (const auto& r : plan.precisions)
    if (r.name == o.precision) plan.precision = r.precision, plan.memory = r.memory;
  for (const char* level : {"none", "gelu", "layernorm", "block"}) {
    Options with = o;
    with.recompute = level;
    plan.recompute.push_back(row(level, with, plan.precision));
  }
  plan.work = step_work(o, c, parameters, plan.precision, plan.memory, owned, ranks);

  plan.run =
      strf("%s, --recompute=%s, %d rank%s", o.precision.c_str(), o.recompute.c_str(), ranks, ranks > 1 ? "s" : "");
  if (ranks > 1) plan.run += strf(", --zero=%d", o.zero);
  plan.model = strf("%s: L = %d, C = %d, NH = %d, T = %d, V = %d (padded to %d)\nparameters %s", o.model.c_str(), c.L,
                    c.C, c.NH, o.seq_len, c.V, c.Vp, human_count(parameters).c_str());
  plan.batch = strf("%s tokens a step: %s x %d sequences", human_count(o.total_batch_tokens).c_str(),
                    human_count(o.total_batch_tokens / o.seq_len / o.batch_size).c_str(), o.batch_size);
  return plan;
}

std::string plan_text(const Plan& plan) {
  const int64_t total = plan.memory.total(), free = capacity(plan.gpu) - total;
  std::string s = "plan       " + plan.run + "\nmodel      " + plan.model + "\nbatch      " + plan.batch + "\n";
  s += strf("gpu        %s: %g GB of memory at %g TB/s, %g TFLOP/s\n", plan.gpu.name, plan.gpu.memory_gb, plan.gpu.tb_s,
            plan.gpu.peak_flops(plan.precision.weight == 2) / 1e12);

  s += strf("\n%-16s %12s %20s\n", plan.ranks > 1 ? "each rank" : "memory", "", "bytes");
  const auto row = [&](const char* name, int64_t bytes, const std::string& note) {
    s += strf("%-16s %12s %20s", name, bytes_text(bytes).c_str(), human_count(bytes).c_str());
    s += note.empty() ? "\n" : "   " + note + "\n";
  };
  for (size_t m = 0; m < memory_names.size(); m++)
    row(memory_names[m], plan.memory.classes[m],
        static_cast<Memory>(m) == Memory::states ? strf("%d bytes a parameter", plan.precision.states) : "");
  row("later", plan.memory.later, "at most, on a GPU: scratch of the kernels, whole pages");
  row("total", total,
      free >= 0 ? "fits: " + bytes_text(free) + " are left" : "does not fit: " + bytes_text(-free) + " too much");
  row("checkpoint", plan.memory[Memory::weights] + plan.memory[Memory::states],
      "about, on the disk, and of the host's memory for its copy");

  s += strf("\n%-16s %12s %12s %10s\n", "--recompute", "activations", "total", "largest B");
  for (const auto& r : plan.recompute)
    s += strf("%-16s %12s %12s %10s\n", r.name.c_str(), bytes_text(r.memory[Memory::activations]).c_str(),
              bytes_text(r.memory.total()).c_str(), batch_text(r.largest_batch).c_str());

  // How much less than with fp32 master weights, the usual mixed precision.
  const auto usual = std::find_if(plan.precisions.begin(), plan.precisions.end(),
                                  [](const auto& r) { return r.name == "fp32_master"; });
  CHECK(usual != plan.precisions.end(), "no fp32_master among the precisions");
  s += strf("\n%-16s %12s %12s %12s %10s %10s %24s\n", "--precision", "bytes/param", "states", "total", "saved",
            "largest B", "AdamW moves, bytes/param");
  for (const auto& r : plan.precisions) {
    const double saved = 1 - static_cast<double>(r.memory.total()) / static_cast<double>(usual->memory.total());
    s += strf("%-16s %12d %12s %12s %8.1f %% %10s %24d\n", r.name.c_str(), r.precision.total(),
              bytes_text(r.memory[Memory::states]).c_str(), bytes_text(r.memory.total()).c_str(), 100 * saved,
              batch_text(r.largest_batch).c_str(), r.precision.moved);
  }
  s += "saved: of the total with fp32_master\n";

  const StepTime time = step_time(plan.work, plan.gpu, plan.precision.weight == 2, plan.network);
  s += "\nfloor on the time of a step, at the GPU's peaks\n";
  const auto line = [&](const char* name, double seconds, const std::string& note) {
    s += strf("%-16s %12s   %s\n", name, time_text(seconds).c_str(), note.c_str());
  };
  line("FLOPs", time.flops,
       strf("%.4g TFLOP: 6 a parameter and token, attention, and what is computed again", plan.work.flops / 1e12));
  line("layers' bytes", time.layers,
       bytes_text(plan.work.layer_bytes) + ": weights read twice, gradients and activations written and read");
  line("optimizer", time.optimizer,
       strf("%s: %d a parameter in AdamW; gradients zeroed, and read for their norm",
            bytes_text(plan.work.optimizer_bytes).c_str(), plan.precision.moved));
  if (plan.ranks > 1)
    line("network", 2 * time.exchange,
         strf("twice %s each way at %g GB/s: beside backward, and after it",
              bytes_text(plan.work.exchanged_bytes).c_str(), plan.network / 1e9));
  line("step", time.floor(),
       strf("the slowest of %s, then %sthe optimizer",
            plan.ranks > 1 ? "FLOPs, bytes and the first exchange" : "the two",
            plan.ranks > 1 ? "the second and " : ""));
  s += strf("%-16s %12s   of all ranks, at most\n", "tokens/s",
            human_count(static_cast<int64_t>(static_cast<double>(plan.step_tokens) / time.floor())).c_str());
  return s;
}
