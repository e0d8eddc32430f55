// bench_gpu: attention and AdamW on a GPU. See README.md here.
//   bench_gpu [--elements=1000000000] [--json=FILE] [--quick]
// --quick: tiny sizes, each once, only to see that everything runs; its figures mean nothing.
// Exit status: 3 if there is no GPU.
#include <cerrno>
#include <memory>

#include "dev/bench/gpu_time.h"
#include "kernels/attention.cuh"
#include "mcf/adamw.cuh"

namespace {

struct AttentionRow {
  int B, NH, T, d;
  double forward_ms, backward_ms, forward_tflops, backward_tflops;
};
struct AdamWRow {
  const char* precision;
  bool quality;
  int bytes;
  double ms, gb_per_s, share_of_copy;
};

// Products of causal attention count half: forward has two of 2 T^2 d operations a head, backward five. (It multiplies
// seven times, since it computes the scores and dP in both of its kernels; the two more do not count.)
AttentionRow measure_attention(int B, int NH, int T, int d, bool quick, Device& device) {
  const int C = NH * d;
  const size_t n = static_cast<size_t>(B) * T * C;
  Buffer<bf16> qkv(device, Memory::activations, 3 * n), out(device, Memory::activations, n);
  Buffer<bf16> dqkv(device, Memory::activations, 3 * n), dout(device, Memory::activations, n);
  Buffer<float> lse(device, Memory::activations, static_cast<size_t>(B) * NH * T);
  fill(qkv.data(), 3 * n, 1.0f, device);
  fill(dout.data(), n, 1.0f, device);
  const double forward = milliseconds(device, quick, [&] {
    attention_forward(out.data(), lse.data(), qkv.data(), B, T, C, NH, device);
  });
  const double backward = milliseconds(device, quick, [&] {
    attention_backward(dqkv.data(), dout.data(), out.data(), lse.data(), qkv.data(), B, T, C, NH, device);
  });
  const double product = 2.0 * B * NH * T * T * d / 2;
  return {B, NH, T, d, forward, backward, 2 * product / forward * 1e-9, 5 * product / backward * 1e-9};
}

// GB/s of a copy on the device, bytes read plus bytes written.
double copy_speed(size_t bytes, bool quick, Device& device) {
  const Buffer<char> from(device, Memory::workspace, bytes), to(device, Memory::workspace, bytes);
  fill(reinterpret_cast<float*>(from.data()), bytes / sizeof(float), 1.0f, device);
  const double ms = milliseconds(device, quick, [&] {
    CUDA_CHECK(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice, device.stream()));
  });
  return 2.0 * static_cast<double>(bytes) / ms * 1e-6;
}

template <class S, class... T>
void measure_adamw(std::vector<AdamWRow>& rows, size_t n, double copy, bool quick, Device& device, std::tuple<T...>*) {
  using floatX = typename S::Theta;
  Buffer<floatX> theta(device, Memory::weights, n), grads(device, Memory::gradients, n);
  std::tuple states(Buffer<T>(device, Memory::states, n)...);
  fill(theta.data(), n, 0.02f, device);
  fill(grads.data(), n, 1e-3f, device);
  if constexpr (!S::reads_theta) fill(std::get<0>(states).data(), n, 0.02f, device);  // a master copy
  std::vector<Block> list;
  append_blocks(list, 0, n, true);
  const BlockList blocks(std::move(list), device);
  Buffer<QualitySums> quality(device, Memory::workspace, blocks.host.size());
  Buffer<AdamWStep> step(device, Memory::workspace, 1);
  const AdamWStep host{adamw_scalars(3e-4, 0.9, 0.95, 1e-8, 0.1, 1.0, 2.0, 100), 0};
  device.upload(step.data(), &host, 1);
  for (const bool with_quality : {false, true}) {
    const double ms = milliseconds(device, quick, [&] {
      std::apply([&](auto&... s) {
        adamw_cuda<S>(theta.data(), grads.data(), blocks.device.data(), blocks.host.size(), step.data(),
                      with_quality ? quality.data() : nullptr, 0, device.stream(), s.data()...);
      }, states);
    });
    const double speed = moved_bytes<S>() * static_cast<double>(n) / ms * 1e-6;
    rows.push_back({S::name, with_quality, moved_bytes<S>(), ms, speed, speed / copy});
    const AdamWRow& r = rows.back();
    printf("%-14s %8s %9d %9.3f %9.0f %10.1f\n", r.precision, with_quality ? "on" : "off", r.bytes, r.ms, r.gb_per_s,
           100 * r.share_of_copy);
    fflush(stdout);
  }
}

void write_json(const char* path, const Machine& machine, size_t elements, double copy,
                const std::vector<AttentionRow>& attention, const std::vector<AdamWRow>& adamw) {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(fopen(path, "w"), fclose);
  if (!file) RUN_ERROR("--json: %s: %s", path, strerror(errno));
  FILE* f = file.get();
  fprintf(f, "{\"gpu\": \"%s\", \"driver_cuda\": \"%s\", \"runtime_cuda\": \"%s\", \"date\": \"%s\",\n",
          machine.gpu.c_str(), machine.driver.c_str(), machine.runtime.c_str(), machine.date.c_str());
  fprintf(f, " \"copy_gb_per_s\": %.1f, \"adamw_elements\": %zu,\n \"attention\": [", copy, elements);
  const char* separator = "\n";
  for (const auto& r : attention) {
    fprintf(f, "%s  {\"B\": %d, \"NH\": %d, \"T\": %d, \"d\": %d, \"forward_ms\": %.4f, \"forward_tflops\": %.1f, ",
            separator, r.B, r.NH, r.T, r.d, r.forward_ms, r.forward_tflops);
    fprintf(f, "\"backward_ms\": %.4f, \"backward_tflops\": %.1f}", r.backward_ms, r.backward_tflops);
    separator = ",\n";
  }
  fprintf(f, "],\n \"adamw\": [");
  separator = "\n";
  for (const auto& r : adamw) {
    fprintf(f, "%s  {\"precision\": \"%s\", \"quality\": %s, \"bytes_per_element\": %d, ", separator, r.precision,
            r.quality ? "true" : "false", r.bytes);
    fprintf(f, "\"ms\": %.4f, \"gb_per_s\": %.1f, \"share_of_copy\": %.4f}", r.ms, r.gb_per_s, r.share_of_copy);
    separator = ",\n";
  }
  fprintf(f, "]}\n");
}

void run(size_t elements, const char* json, bool quick) {
  Device device(DeviceKind::cuda, 0, 0);
  const Machine machine(device);
  machine.print();

  std::vector<AttentionRow> attention;
  printf("attention, bf16, causal products counted half\n");
  printf("%4s %4s %6s %4s %12s %9s %12s %9s\n", "B", "NH", "T", "d", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s");
  const int shapes[][4] = {{8, 12, 1024, 64}, {4, 16, 2048, 128}};  // B, NH, T, d
  for (const auto& s : shapes) {
    attention.push_back(measure_attention(quick ? 1 : s[0], quick ? 1 : s[1], quick ? 64 : s[2], s[3], quick, device));
    const AttentionRow& r = attention.back();
    printf("%4d %4d %6d %4d %12.3f %9.1f %12.3f %9.1f\n", r.B, r.NH, r.T, r.d, r.forward_ms, r.forward_tflops,
           r.backward_ms, r.backward_tflops);
    fflush(stdout);
  }

  // The widest strategy takes 16 bytes an element; some memory is left for the rest of the machine.
  size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  elements = std::min(elements, free / 20 / block_elements * block_elements);
  const double copy = copy_speed(8 * elements, quick, device);
  printf("\nadamw, %zu elements; copy on the device: %.0f GB/s (bytes read + written)\n", elements, copy);
  printf("%-14s %8s %9s %9s %9s %10s\n", "precision", "quality", "B/element", "ms", "GB/s", "% of copy");
  std::vector<AdamWRow> adamw;
  [&]<class... S>(std::tuple<S...>*) {
    (measure_adamw<S>(adamw, elements, copy, quick, device, static_cast<typename S::States*>(nullptr)), ...);
  }(static_cast<Strategies*>(nullptr));
  if (json) write_json(json, machine, elements, copy, attention, adamw);
}

}  // namespace

int main(int argc, char** argv) {
  size_t elements = 1000000000;
  const char* json = nullptr;
  bool quick = false;
  for (int i = 1; i < argc; i++) {
    const std::string arg = argv[i];
    if (arg.starts_with("--elements=") && std::atoll(argv[i] + 11) > 0) {
      elements = static_cast<size_t>(std::atoll(argv[i] + 11));
    } else if (arg.starts_with("--json=")) {
      json = argv[i] + 7;
    } else if (arg == "--quick") {
      quick = true;
      elements = std::min(elements, size_t{2} * block_elements);
    } else {
      fprintf(stderr, "usage: bench_gpu [--elements=1000000000] [--json=FILE] [--quick]\n");
      return 2;
    }
  }
  try {
    std::string why_not;
    if (!Device::gpus(why_not)) {
      fprintf(stderr, "bench_gpu: %s\n", why_not.c_str());
      return 3;
    }
    run(elements, json, quick);
    return 0;
  } catch (const std::exception& e) {
    fprintf(stderr, "bench_gpu: %s\n", e.what());
    return 1;
  }
}
