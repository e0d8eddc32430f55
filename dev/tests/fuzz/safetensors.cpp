// A safetensors file: opened; its tensors cover its data once; a header made of them is read the same.
#include "runtime/safetensors.h"

#include "dev/tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const char* data, size_t size) {
  static InputFile file, again;
  file.set({data, size});
  return fuzz([] {
    const Safetensors s(file.path(), "--model: x");
    std::string bytes;
    for (const TensorInfo& t : s.tensors()) {
      CHECK(t.elements() * dtype_bytes(t.dtype) == t.end - t.begin, "%s", t.name.c_str());
      CHECK(s.find(t.name) == &t, "%s", t.name.c_str());
      bytes.append(s.data(t), static_cast<size_t>(t.end - t.begin));
    }
    std::vector<TensorInfo> tensors = s.tensors();
    again.set(safetensors_header(tensors, true) + bytes);
    const Safetensors copy(again.path(), "copy");
    CHECK(copy.tensors().size() == tensors.size(), "%zu of %zu tensors", copy.tensors().size(), tensors.size());
    for (const TensorInfo& t : s.tensors()) {
      const TensorInfo* c = copy.find(t.name);
      CHECK(c && c->shape == t.shape && c->dtype == t.dtype && c->begin == t.begin, "%s", t.name.c_str());
    }
  });
}
