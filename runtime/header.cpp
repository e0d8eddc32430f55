#include "runtime/header.h"

#include <cstdio>

#include "runtime/error.h"
#include "runtime/preflight.h"
#include "runtime/product.h"
#include "runtime/terminal.h"

namespace {

// "name  line", and the lines that follow it below.
void print_lines(const char* name, const std::vector<std::string>& lines) {
  for (size_t i = 0; i < lines.size(); i++) printf("%-10s %s\n", i == 0 ? name : "", lines[i].c_str());
}

std::vector<std::string> device_lines(const Header& h) {
  std::vector<std::string> lines;
  const Device& device = h.device;
  if (device.is_cuda()) {
    const cudaDeviceProp& gpu = device.properties();
    return {strf("%s, compute capability %d.%d, %s", gpu.name, gpu.major, gpu.minor,
                 h.peak > 0 ? strf("peak %.0f TFLOP/s", h.peak / 1e12).c_str() : "peak unknown: no MFU")};
  }
  lines.push_back(strf("CPU, %d thread%s, %s, %.0f GFLOP/s measured", device.threads(),
                       device.threads() == 1 ? "" : "s", product_library().c_str(), h.peak / 1e9));
  if (h.o.device == "auto") lines.push_back(h.why_no_gpu + ": training on the CPU");
  if (const std::string warning = product_warning(h.in_bf16); !warning.empty()) lines.push_back(warning);
  return lines;
}

std::vector<std::string> rank_lines(const Header& h) {
  if (h.comm.ranks() == 1) return {};
  std::vector<std::string> lines = h.devices;
  lines.insert(lines.begin(), strf("%d over %s; %s", h.comm.ranks(), h.comm.transport().c_str(),
                                   h.o.zero ? "optimizer states are shared out (--zero=1)"
                                            : "each with all optimizer states (--zero=0)"));
  return lines;
}

std::vector<std::string> model_lines(const Header& h) {
  const ModelConfig& c = h.config;
  const std::string shape =
      strf("%d layers, %d channels, %d heads, T = %d, vocabulary %d (padded to %d), %s parameters", c.L, c.C, c.NH,
           c.max_T, c.V, c.Vp, human_count(h.parameters).c_str());
  std::vector<std::string> lines = {h.o.model + ": " + shape};
  if (lines[0].size() > 109) lines = {h.o.model, shape};
  if (h.file)
    lines.push_back(strf("weights from this file, %s%s; %d of its %d positions", h.file->dtype().c_str(),
                         h.in_bf16 && h.file->dtype() != "BF16" ? " rounded to BF16" : "", c.max_T, h.file->max_T));
  return lines;
}

std::vector<std::string> precision_lines(const Header& h) {
  std::vector<std::string> lines = {h.precision};
  if (!h.o.lockstep.empty()) lines.push_back("in lock-step, fed with its gradients: " + h.o.lockstep);
  if (h.o.shadow) lines.push_back("compared with fp64 AdamW on one weight in " + human_count(h.o.shadow));
  return lines;
}

std::vector<std::string> val_lines(const Header& h) {
  std::vector<std::string> lines = {h.data.val ? describe(*h.data.val) : "none: no --val-data"};
  for (const auto& path : h.data.in_both()) lines.push_back("warning: " + path + " is trained on and validated on");
  return lines;
}

std::vector<std::string> memory_lines(const Header& h) {
  std::string line;
  for (size_t m = 0; m < h.memory.size(); m++)
    line += strf("%s%s %s", m ? ", " : "", memory_names[m], human_bytes(static_cast<double>(h.memory[m])).c_str());
  std::vector<std::string> lines = {line};
  if (h.comm.ranks() > 1) lines.push_back("on each rank");
  return lines;
}

}  // namespace

void print_header(const Header& h) {
  const Options& o = h.o;
  print_lines("train_gpt", {version()});
  print_lines("device", device_lines(h));
  print_lines("ranks", rank_lines(h));
  print_lines("model", model_lines(h));
  print_lines("precision", precision_lines(h));
  printf("%s", preflight_text(o).c_str());
  if (h.data.train) print_lines("train", {describe(*h.data.train)});
  print_lines("val", val_lines(h));
  if (!o.eval_only)
    print_lines(
        "batch",
        {strf("%s tokens a step: %lld x %d sequences; %s steps, %.3g epochs", human_count(o.total_batch_tokens).c_str(),
              static_cast<long long>(h.step_sequences / o.batch_size), o.batch_size, human_count(o.steps).c_str(),
              static_cast<double>(o.steps * h.step_sequences) / static_cast<double>(h.data.train->sequences()))});
  print_lines("memory", memory_lines(h));
  print_lines("output", h.output);
  print_lines("resumed", h.resumed);
  print_lines("", {"ready in " + human_time(h.seconds)});
  fflush(stdout);
}
