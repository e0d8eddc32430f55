// The arithmetic of --plan. That its bytes are those of a real run is plan_test.py's business.
#include "runtime/plan.h"

#include <gtest/gtest.h>

#include <sstream>

#include "runtime/error.h"

namespace {

std::string error_of(const std::string& gpu) {
  try {
    planned_gpu(gpu);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

// A run that takes 1000 bytes and 100 for each sequence.
MemoryPlan linear(const Options& o, const PrecisionBytes&) {
  MemoryPlan plan;
  plan[Memory::weights] = 1000, plan[Memory::activations] = 60 * o.batch_size, plan.later = 40 * o.batch_size;
  return plan;
}

}  // namespace

TEST(Plan, AdamWMovesWhatTheStatesSay) {
  // The paper's traffic for a fused pass: weights, states both ways and the gradient; a bf16 weight with a master copy
  // beside it is written only.
  EXPECT_EQ(precision_bytes<Bf16>().moved, 14);
  EXPECT_EQ(precision_bytes<Bf16Sr>().moved, 14);
  EXPECT_EQ(precision_bytes<Bf16Int8>().moved, 16);
  EXPECT_EQ(precision_bytes<CollageLight>().moved, 18);
  EXPECT_EQ(precision_bytes<Bf16Kahan>().moved, 18);
  EXPECT_EQ(precision_bytes<Bf16Rem16>().moved, 18);
  EXPECT_EQ(precision_bytes<CollagePlus>().moved, 22);
  EXPECT_EQ(precision_bytes<Fp32Optim>().moved, 22);
  EXPECT_EQ(precision_bytes<Fp32Master>().moved, 28);
  EXPECT_EQ(precision_bytes<Fp32>().moved, 28);
  EXPECT_EQ(precision_bytes<CollagePlus>().total(), 12);
}

TEST(Plan, LargestBatch) {
  const PrecisionBytes p = precision_bytes<Bf16>();
  EXPECT_EQ(largest_batch(Options(), p, linear, 1099, 100), 0);
  EXPECT_EQ(largest_batch(Options(), p, linear, 1100, 100), 1);
  EXPECT_EQ(largest_batch(Options(), p, linear, 8399, 100), 73);
  EXPECT_EQ(largest_batch(Options(), p, linear, 8399, 50), 50);
  EXPECT_EQ(largest_batch(Options(), p, linear, 1100 + 100 * int64_t{1 << 20}, 1 << 21), (1 << 20) + 1);
  EXPECT_EQ(largest_batch(Options(), p, linear, 8399, 0), 0);
}

TEST(Plan, ARunThatDoesNotFitIsRefusedWithWhatDoes) {
  Options o;
  o.batch_size = 8;
  const PrecisionBytes p = precision_bytes<Bf16>();
  EXPECT_NO_THROW(require_memory(o, p, linear, 1800));
  for (const auto& [free, hint] :
       {std::pair{1799, "--batch-size=7"}, {1100, "--batch-size=1"}, {1099, "no batch size"}})
    try {
      require_memory(o, p, linear, free);
      ADD_FAILURE() << free;
    } catch (const RunError& error) {
      EXPECT_NE(std::string(error.what()).find(hint), std::string::npos) << error.what();
    }
}

TEST(Plan, Gpus) {
  EXPECT_EQ(planned_gpu("H100").memory_gb, 80);
  EXPECT_EQ(planned_gpu("H100").bf16, 989);  // not the PCIe card's
  EXPECT_EQ(planned_gpu("A10").memory_gb, 24);
  EXPECT_EQ(planned_gpu("4090").memory_gb, 24);
  EXPECT_EQ(planned_gpu("RTX 4090").tb_s, 1.008);
  const Gpu own = planned_gpu("40,1.5,312");
  EXPECT_EQ(own.memory_gb, 40);
  EXPECT_EQ(own.tb_s, 1.5);
  EXPECT_EQ(own.peak_flops(true), 312e12);
  EXPECT_EQ(own.peak_flops(false), 312e12);
  for (const char* bad : {"h100", "foo", "", "H10", "80", "80,3", "80,3,", "80,3,989,1", "80,3,989x", "80,,989",
                          "-80,3,9", "0,3,989", "nan,3,989", "80,inf,989", "80;3;989", "1e9,1,1", " 80,3,989"})
    EXPECT_TRUE(error_of(bad).starts_with("--gpu: found ")) << bad;
}

TEST(Plan, NamesOfDriversFindTheirPeak) {
  EXPECT_EQ(gpu_peak_flops("NVIDIA H100 80GB HBM3", true), 989e12);
  EXPECT_EQ(gpu_peak_flops("NVIDIA H100 PCIe", true), 756e12);
  EXPECT_EQ(gpu_peak_flops("NVIDIA A100-SXM4-40GB", true), 312e12);
  EXPECT_EQ(gpu_peak_flops("NVIDIA GeForce RTX 4090", false), 82.6e12);
  EXPECT_EQ(gpu_peak_flops("NVIDIA L40S", true), 362e12);
  EXPECT_EQ(gpu_peak_flops("NVIDIA A40", true), 150e12);
  EXPECT_EQ(gpu_peak_flops("NVIDIA RTX A4000", true), 0);
  EXPECT_EQ(gpu_peak_flops("NVIDIA A10G", true), 70e12);
}

// By hand, for a model of 1 layer, 4 channels, 1,000 parameters; 4 sequences of 10 tokens over 2 ranks and 2
// micro-batches.
TEST(Plan, WorkAndTimeOfAStep) {
  Options o;
  o.batch_size = 1, o.seq_len = 10, o.total_batch_tokens = 40;
  ModelConfig c;
  c.L = 1, c.C = 4, c.NH = 1;
  MemoryPlan memory;
  memory[Memory::weights] = memory[Memory::gradients] = 2048, memory[Memory::activations] = 500;
  const PrecisionBytes p = precision_bytes<CollagePlus>();
  const StepWork work = step_work(o, c, 1000, p, memory, 512, 2);
  EXPECT_EQ(work.flops, 20 * (6 * 1000 + 6 * 10 * 4));
  EXPECT_EQ(work.layer_bytes, 2 * 2 * (2048 + 2048 + 500));
  EXPECT_EQ(work.optimizer_bytes, 512 * 22 + 2048 + 512 * 2);
  EXPECT_EQ(work.exchanged_bytes, 1024);  // half of the gradients are the other rank's
  MemoryPlan with_sum = memory;           // --grad-accum=fp32: 4 more bytes to read and write, but not to send
  with_sum[Memory::gradients] = 3 * 2048;
  EXPECT_EQ(step_work(o, c, 1000, p, with_sum, 512, 2).layer_bytes, work.layer_bytes + 2 * 2 * 2 * 2048);
  EXPECT_EQ(step_work(o, c, 1000, p, with_sum, 512, 2).optimizer_bytes, work.optimizer_bytes);
  EXPECT_EQ(step_work(o, c, 1000, p, with_sum, 512, 2).exchanged_bytes, 1024);
  o.recompute = "block";  // 8 C^2 weights of a layer again, and its attention forward
  EXPECT_EQ(step_work(o, c, 1000, p, memory, 512, 2).flops, work.flops + 20 * (16 * 16 + 2 * 10 * 4));

  const Gpu gpu = {"", 1e-3, 2e-3, 1, 1e-6};  // 1e9 and 2e9 FLOP/s, 1e6 bytes/s
  const StepTime time = step_time(work, gpu, true, 1e5);
  EXPECT_DOUBLE_EQ(time.flops, work.flops / 1e9);
  EXPECT_DOUBLE_EQ(time.layers, work.layer_bytes / 1e6);
  EXPECT_DOUBLE_EQ(time.optimizer, work.optimizer_bytes / 1e6);
  EXPECT_DOUBLE_EQ(time.exchange, 0.01024);
  EXPECT_DOUBLE_EQ(time.floor(), time.layers + time.exchange + time.optimizer);  // the bytes are the slowest
  EXPECT_DOUBLE_EQ(step_time(work, gpu, false, 1e5).flops, work.flops / 2e9);
}
