// A token shard: opened, all ids checked, all copied.
#include "dataloader/shards.h"

#include <algorithm>
#include <vector>

#include "dev/tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const char* data, size_t size) {
  static InputFile file;
  file.set({data, size});
  return fuzz([] {
    const Shard shard(file.path(), "--train-data");
    constexpr int V = 50257;
    shard.check_tokens(V, "--train-data");
    std::vector<int32_t> ids(static_cast<size_t>(shard.tokens()));
    shard.copy(0, shard.tokens(), ids.data());
    for (const int32_t id : ids) CHECK(id >= 0 && id < V, "id %d passed", id);
  });
}
