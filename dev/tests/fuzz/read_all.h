// What the fuzz targets of model files do with one that opened.
#pragma once
#include <vector>

#include "runtime/model_file.h"

// Reads the weights that differ in form: plain, transposed, vectors; in two parts.
inline void read_all(const ModelFile& file) {
  const size_t C = static_cast<size_t>(file.C), V = static_cast<size_t>(file.V), T = static_cast<size_t>(file.max_T);
  std::vector<float> values;
  const auto read = [&](const std::string& name, size_t n) {
    values.resize(n);
    file.read(name, 0, n / 3, values.data());
    file.read(name, n / 3, n - n / 3, values.data() + n / 3);
  };
  read("wte.weight", V * C), read("wpe.weight", T * C), read("ln_f.bias", C);
  for (int l = 0; l < file.L; l++) {
    const std::string h = "h." + std::to_string(l) + ".";
    read(h + "attn.c_attn.weight", 3 * C * C), read(h + "attn.c_attn.bias", 3 * C);
    read(h + "mlp.c_proj.weight", 4 * C * C), read(h + "ln_2.weight", C);
  }
}
