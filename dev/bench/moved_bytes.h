// Bytes that an AdamW pass must move for an element: the gradient is read, weight and states are read and written.
// Beside a master copy the bf16 weight is written only.
#pragma once
#include "mcf/strategies.h"

template <class S>
constexpr int moved_bytes() {
  constexpr int x = sizeof(typename S::Theta);
  return 2 * bytes_per_parameter<S>() - x - (starts_as_theta(S::state_names[0]) ? x : 0);
}
