// bench_ladder: every version of the ladder on a GPU, its time beside the production kernel's. See README.md in
// dev/bench.
//   bench_ladder [--quick]
// --quick: tiny sizes, each once, only to see that everything runs. Exit status: 3 if there is no GPU.
#include "dev/bench/gpu_time.h"
#include "dev/bench/ladder/adamw.cuh"
#include "dev/bench/ladder/attention.cuh"
#include "dev/bench/ladder/layernorm.cuh"

namespace {

struct Row {
  const char* name;
  double ms, speed;
};

// The last row is the production kernel.
void print(const std::string& title, const char* unit, const std::vector<Row>& rows) {
  printf("%s\n%-34s %10s %10s %18s\n", title.c_str(), "version", "ms", unit, "production is");
  for (const Row& r : rows)
    printf("%-34s %10.3f %10.1f %13.1fx as fast\n", r.name, r.ms, r.speed, r.ms / rows.back().ms);
  printf("\n");
  fflush(stdout);
}

void layernorm(bool quick, Device& device) {
  const int rows = quick ? 16 : 8192, C = 768;
  const size_t n = static_cast<size_t>(rows) * C, channels = static_cast<size_t>(C), R = static_cast<size_t>(rows);
  Buffer<bf16> inp(device, Memory::activations, n), out(device, Memory::activations, n);
  Buffer<bf16> weight(device, Memory::weights, channels), bias(device, Memory::weights, channels);
  Buffer<float> mean(device, Memory::activations, R), rstd(device, Memory::activations, R);
  fill(inp.data(), n, 1.0f, device);
  fill(weight.data(), channels, 1.0f, device);
  fill(bias.data(), channels, 1.0f, device);
  std::vector<Row> table;
  for (const auto& version : ladder::layernorm_versions<bf16>) {
    const double ms = milliseconds(device, quick, [&] {
      version.run(out, mean, rstd, inp, weight, bias, rows, C, device.stream());
    });
    table.push_back({version.name, ms, 2.0 * sizeof(bf16) * static_cast<double>(n) / ms * 1e-6});
  }
  print(strf("LayerNorm forward, bf16, %d rows of %d; what must move: 4 bytes an element", rows, C), "GB/s", table);
}

void adamw(bool quick, Device& device) {
  const size_t n = quick ? 2 * block_elements : size_t{124} << 20;
  Buffer<bf16> grads(device, Memory::gradients, n), theta(device, Memory::weights, n);
  Buffer<bf16> theta_lo(device, Memory::states, n), m(device, Memory::states, n), v(device, Memory::states, n);
  Buffer<bf16> v_lo(device, Memory::states, n), g(device, Memory::workspace, n), u(device, Memory::workspace, n);
  fill(theta.data(), n, 0.02f, device);
  fill(grads.data(), n, 1e-3f, device);
  std::vector<Block> list;
  append_blocks(list, 0, n, true);
  const BlockList blocks(std::move(list), device);
  Buffer<AdamWStep> step(device, Memory::workspace, 1);
  const AdamWStep host{adamw_scalars(3e-4, 0.9, 0.95, 1e-8, 0.1, 1.0, 2.0, 100), 0};
  device.upload(step.data(), &host, 1);
  const ladder::AdamWArrays arrays{theta, grads, theta_lo, m, v, v_lo, g, u, blocks.device, n, blocks.host.size(),
                                   step};
  std::vector<Row> table;
  for (const auto& version : ladder::adamw_versions) {
    const double ms = milliseconds(device, quick, [&] { version.run(arrays, device.stream()); });
    table.push_back({version.name, ms, version.bytes * static_cast<double>(n) / ms * 1e-6});
  }
  print(strf("AdamW, collage_plus, %zu elements; GB/s of what the version itself moves", n), "GB/s", table);
}

void attention(bool quick, Device& device) {
  const int B = quick ? 1 : 8, NH = quick ? 1 : 12, T = quick ? 64 : 1024, d = 64, C = NH * d;
  const size_t n = static_cast<size_t>(B) * T * C, stats = static_cast<size_t>(B) * NH * T;
  Buffer<bf16> qkv(device, Memory::activations, 3 * n), out(device, Memory::activations, n);
  Buffer<float> lse(device, Memory::activations, stats);
  Buffer<float> scores(device, Memory::workspace, stats * static_cast<size_t>(T));
  fill(qkv.data(), 3 * n, 1.0f, device);
  const ladder::AttentionArrays<bf16> arrays{out, lse, qkv, scores, B, T, C, NH};
  std::vector<Row> table;
  for (const auto& version : ladder::attention_versions<bf16>) {
    const double ms = milliseconds(device, quick, [&] { version.run(arrays, device.stream()); });
    table.push_back({version.name, ms, 2.0 * B * NH * T * T * d / ms * 1e-9});  // two products, half of each
  }
  print(strf("Attention forward, bf16, B = %d, NH = %d, T = %d, d = %d, causal products counted half", B, NH, T, d),
        "TFLOP/s", table);
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc == 2 && std::string(argv[1]) == "--quick";
  if (argc > 2 || (argc == 2 && !quick)) {
    fprintf(stderr, "usage: bench_ladder [--quick]\n");
    return 2;
  }
  try {
    std::string why_not;
    if (!Device::gpus(why_not)) {
      fprintf(stderr, "bench_ladder: %s\n", why_not.c_str());
      return 3;
    }
    Device device(DeviceKind::cuda, 0, 0);
    Machine(device).print();
    layernorm(quick, device);
    adamw(quick, device);
    attention(quick, device);
    return 0;
  } catch (const std::exception& e) {
    fprintf(stderr, "bench_ladder: %s\n", e.what());
    return 1;
  }
}
