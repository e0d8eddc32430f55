// A tokenizer file: opened; what its tokens spell is encoded and comes back.
#include "dataloader/tokenizer.h"

#include "dev/tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const char* data, size_t size) {
  static InputFile file;
  file.set({data, size});
  return fuzz([] {
    const Tokenizer tokenizer(file.path());
    CHECK(tokenizer.eot() >= 0 && tokenizer.eot() < tokenizer.vocab_size(), "end-of-text %d", tokenizer.eot());
    std::string text, back;
    for (int32_t id = 0; id < tokenizer.vocab_size() && text.size() < 4096; id++) text += tokenizer.decode(id);
    for (const int32_t id : tokenizer.encode(text)) back += tokenizer.decode(id);
    CHECK(back == text, "%zu bytes came back as %zu", text.size(), back.size());
  });
}
