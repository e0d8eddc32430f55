// Weights in files. So far: those of a checkpoint folder.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>

#include "runtime/error.h"
#include "runtime/safetensors.h"

class ModelFile {
 public:
  ModelFile(const std::string& path, const std::string& who) : file_(path + "/model.safetensors", who) {}

  // Elements first .. first + n - 1 of a weight by its Hugging Face name, in this program's layout (out, in), as floats.
  void read(const std::string& name, size_t first, size_t n, float* out) const {
    const TensorInfo* t = file_.find(name);
    if (!t) RUN_ERROR("%s: found no tensor %s", file_.who().c_str(), name.c_str());
    const bool transposed = name.starts_with("h.") && t->shape.size() == 2;
    const size_t columns = static_cast<size_t>(t->shape[0]);
    const size_t rows = transposed ? static_cast<size_t>(t->shape[1]) : 1;
    for (size_t i = 0; i < n; i++) {
      const size_t k = first + i, at = transposed ? k % columns * rows + k / columns : k;
      uint32_t bits = 0;
      if (t->dtype == "F32")
        memcpy(&bits, file_.data(*t) + at * 4, 4);
      else
        memcpy(reinterpret_cast<char*>(&bits) + 2, file_.data(*t) + at * 2, 2);
      memcpy(out + i, &bits, 4);
    }
  }

 private:
  Safetensors file_;
};
