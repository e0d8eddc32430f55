// Names the AdamW kernel of every strategy, so that nvcc compiles them. Never run: dev/tests/nvcc_check.sh and
// dev/tests/ptx_check.sh read what the compiler makes of it.
#include "mcf/adamw_kernel.cuh"

template <class S, class... T>
void instantiate(std::tuple<T...>*) {
  adamw_cuda<S, T...>(nullptr, nullptr, nullptr, 1, nullptr, nullptr, 0, nullptr, static_cast<T*>(nullptr)...);
}
template <class... S>
void all_strategies(std::tuple<S...>*) {
  (instantiate<S>(static_cast<typename S::States*>(nullptr)), ...);
  clip_and_skip_cuda(nullptr, nullptr, 1, nullptr);
}
template void all_strategies(Strategies*);
template void all_strategies(Variants*);
