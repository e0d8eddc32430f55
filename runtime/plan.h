// The plan of --plan: what a run takes of a GPU's memory, what a step must do, and how long that takes at least.
//
// Arithmetic and text only; no device, no data. The sizes come from the parameter table and the layouts of
// train_gpt.cu, which allocate by the same code. The check before a GPU run asks the same functions.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "mcf/strategies.h"
#include "runtime/gpu_peak.h"
#include "runtime/model_config.h"
#include "runtime/options.h"

// Bytes of one rank.
struct MemoryPlan {
  std::array<int64_t, memory_names.size()> classes{};  // as Device counts them once model and optimizer are there
  int64_t later = 0;  // on top, while it runs: scratch of a GPU's kernels, and the pages that its memory comes in
  int64_t& operator[](Memory memory) { return classes[static_cast<size_t>(memory)]; }
  int64_t operator[](Memory memory) const { return classes[static_cast<size_t>(memory)]; }
  int64_t total() const;
};

// A precision in bytes of one parameter.
struct PrecisionBytes {
  const char* name;
  int weight;  // and as many of the gradient
  int states;
  int moved;  // by AdamW in one step
  int total() const { return 2 * weight + states; }
};

template <class S>
constexpr PrecisionBytes precision_bytes() {
  constexpr int weight = sizeof(typename S::Theta);
  return {S::name, weight, bytes_per_parameter<S>() - 2 * weight, moved_bytes<S>()};
}

// The memory of a run with these flags in this precision.
using MemoryPlanner = std::function<MemoryPlan(const Options& o, const PrecisionBytes& precision)>;

// The largest --batch-size from 1 to max_B with which a run takes at most so many bytes; 0 where none does.
int largest_batch(Options o, const PrecisionBytes& precision, const MemoryPlanner& memory, int64_t bytes, int max_B);

// Refuses a run that takes more than the free bytes of a GPU, and says what would fit. Throws RunError.
void require_memory(const Options& o, const PrecisionBytes& precision, const MemoryPlanner& memory, int64_t free);

// What one rank does in one step.
struct StepWork {
  double flops;            // of matrix products: 6 a parameter and token, attention, what backward computes again
  double layer_bytes;      // forward and backward: in each micro-batch weights are read twice, gradients read and
                           // written, stored activations written and read
  double optimizer_bytes;  // AdamW; gradients zeroed, and read for their norm
  double exchanged_bytes;  // sent beside backward, gradients to their owners, and once more after it: gradients to all
                           // (--zero=0), or weights (--zero=1)
};
// parameters: of the model; owned: elements that this rank updates. o is resolved.
StepWork step_work(const Options& o, const ModelConfig& c, int64_t parameters, const PrecisionBytes& precision,
                   const MemoryPlan& memory, int64_t owned, int ranks);

// Seconds that the parts of a step take at the peaks of GPU and network (bytes a second, each way).
struct StepTime {
  double flops, layers, exchange, optimizer;
  // No step is faster than the slowest of what runs side by side, and then what waits for it.
  double floor() const;
};
StepTime step_time(const StepWork& work, const Gpu& gpu, bool in_bf16, double network);

// --gpu: a name of known_gpus, with or without "RTX ", or "<GB>,<TB/s>,<TFLOP/s>". Throws UsageError.
Gpu planned_gpu(const std::string& text);

struct Plan {
  std::string run, model, batch;  // what is planned
  Gpu gpu;
  double network;  // bytes a second that a rank sends, and as many that it receives
  int ranks;
  PrecisionBytes precision;
  MemoryPlan memory;
  StepWork work;
  int64_t step_tokens;  // of all ranks
  struct Row {
    std::string name;
    PrecisionBytes precision;
    MemoryPlan memory;
    int largest_batch;
  };
  std::vector<Row> recompute, precisions;  // the plan at each level, and of each precision
};
// o is resolved: model, seq_len and total_batch_tokens are known. parameters and owned as in step_work(). Throws
// UsageError.
Plan make_plan(const Options& o, const ModelConfig& c, int64_t parameters, int64_t owned, int ranks,
               const MemoryPlanner& memory);
// At most 120 columns.
std::string plan_text(const Plan& plan);
