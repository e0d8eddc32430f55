// What a run prints before its first step: what runs where, on what, and in what.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dataloader/data.h"
#include "kernels/device.h"
#include "runtime/comm.h"
#include "runtime/model_config.h"
#include "runtime/options.h"

struct Header {
  const Options& o;  // completed
  const ModelConfig& config;
  const std::optional<ModelFile>& file;  // that the weights are from
  const Data& data;
  const Device& device;
  const Comm& comm;
  std::vector<std::string> devices;  // of all ranks
  std::string why_no_gpu;            // "": there is one
  double peak;                       // FLOP/s of all ranks; 0 = unknown
  int64_t parameters;                // of the model
  std::string precision;             // a line: name, what it stores, bytes
  bool in_bf16;
  int64_t step_sequences;
  std::array<int64_t, memory_names.size()> memory;  // bytes of this rank, by class
  std::vector<std::string> output, resumed;         // lines; may be empty
  double seconds;                                   // since the program began to allocate
};
void print_header(const Header& header);
