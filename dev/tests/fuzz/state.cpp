// state.json of a checkpoint, and the flags in it. The input ends before the checksum, which is added: else nearly all
// inputs would be refused for it alone.
#include "dev/tests/fuzz/fuzz.h"
#include "runtime/checkpoint.h"
#include "runtime/crc32.h"
#include "runtime/options.h"

extern "C" int LLVMFuzzerTestOneInput(const char* data, size_t size) {
  static InputFile file;
  static InputFolder folder;
  static const bool linked = [] {
    folder.link(file, "checkpoints/step_00000002/state.json");
    return true;
  }();
  CHECK(linked, "no link");
  std::string text(data, size);
  text += strf(",\n  \"checksum\": \"%08x\"\n}\n", crc32(data, size));
  file.set(text);
  return fuzz([] {
    const auto checkpoint = newest_checkpoint(folder.path());
    CHECK(checkpoint, "not found");
    Options options;
    options.resume = true;
    take_flags(options, checkpoint->state.flags, "--resume: x");
  });
}
