// Streams as queues of work. Used by launches (intrinsics.h) and by the emulated runtime library.
#pragma once
#include <cstddef>
#include <functional>

#include "kernels/vector_types.h"

namespace simt {

// Puts work on a stream: run at once, queued, or recorded into the graph that the stream is capturing. The null stream
// waits for all others first and runs at once (CUDA's legacy default stream; ours are all blocking ones in this sense).
void submit(cudaStream_t stream, std::function<void()> work);
// Aborts unless the pointer is null or in live device memory, or in pinned host memory.
void check_argument(const void* pointer, const char* text);
// Aborts unless all these bytes are live device memory.
void check_range(const void* pointer, size_t bytes, const char* call);

}  // namespace simt
