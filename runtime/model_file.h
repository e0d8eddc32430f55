// A GPT-2's weights in a file, whoever wrote it:
//   a folder with model.safetensors and config.json, this program's or transformers'; names with or without
//   "transformer.", F32, F16 or BF16
//   such a .safetensors file by itself; config.json beside it is read where it is there
//   llm.c's .bin: 256 int32 (magic 20240326, version 3 for fp32 or 5 for bf16, max_T, V, L, NH, C, Vp, zeros), then
//   the tensors by kind, each kind over all layers: wte (Vp, C), wpe, ln1w (L, C), ln1b, qkvw (L, 3C, C), qkvb,
//   attprojw, attprojb, ln2w, ln2b, fcw, fcb, fcprojw, fcprojb, lnfw, lnfb (train_gpt2.cu, gpt2_write_to_checkpoint)
// The file is memory-mapped, so weights are read at the speed of the disk and exist once.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "runtime/safetensors.h"

class ModelFile {
 public:
  // Checks all sizes, names and the configuration; the weights' values are not looked at. who: what messages begin
  // with, the flag that named the file. Throws RunError: defective, not GPT-2, or a GPT-2 that this program computes
  // differently (another activation, an output projection of its own, ...).
  ModelFile(const std::string& path, const std::string& who);
  // Whether --model means a file: it has a '/', ends in .bin or .safetensors, or names something that exists.
  static bool is_path(const std::string& model);

  int L = 0, C = 0, max_T = 0, V = 0;
  int NH = 0;                                          // 0: the file does not say
  const std::string& dtype() const { return dtype_; }  // of wte: "F32", "F16" or "BF16"

  // Elements first .. first + n - 1 of a weight, by its Hugging Face name without "transformer.", in this program's
  // layout: (out, in) row-major; wte (V, C). Exact, as every element is a float already. Thread-safe.
  void read(const std::string& name, size_t first, size_t n, float* out) const;

 private:
  struct Weight {
    const char* data;
    std::string dtype;
    size_t rows, columns;  // in this program's layout; a vector has one column
    bool transposed;       // in the file: (columns, rows)
  };
  void open_safetensors(const std::string& path, const std::string& who);
  void open_bin(const std::string& path, const std::string& who);
  void check_sizes(int64_t max_T, int64_t V, int64_t L, int64_t C, const std::string& who);
  void check_config(const std::string& path, const std::string& who);

  std::optional<Safetensors> safetensors_;
  std::optional<MappedFile> bin_;
  std::string dtype_;
  std::map<std::string, Weight, std::less<>> weights_;
};
