// A folder of transformers'. The input is config.json, a zero byte, model.safetensors.
#include <algorithm>

#include "dev/tests/fuzz/fuzz.h"
#include "dev/tests/fuzz/read_all.h"

extern "C" int LLVMFuzzerTestOneInput(const char* data, size_t size) {
  static InputFile config, weights;
  static InputFolder folder;
  static const bool linked = [] {
    folder.link(config, "config.json"), folder.link(weights, "model.safetensors");
    return true;
  }();
  CHECK(linked, "no links");
  const char* end = data + size;
  const char* zero = std::find(data, end, '\0');
  config.set({data, static_cast<size_t>(zero - data)});
  weights.set(zero == end ? std::string_view() : std::string_view(zero + 1, static_cast<size_t>(end - zero - 1)));
  return fuzz([] { read_all(ModelFile(folder.path(), "--model")); });
}
