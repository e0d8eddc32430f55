// A model in one file, llm.c's .bin or safetensors: opened, its weights read.
#include "dev/tests/fuzz/fuzz.h"
#include "dev/tests/fuzz/read_all.h"

extern "C" int LLVMFuzzerTestOneInput(const char* data, size_t size) {
  static InputFile file;
  file.set({data, size});
  return fuzz([] { read_all(ModelFile(file.path(), "--model")); });
}
