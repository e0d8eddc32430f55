// Runs a test under many orders of execution. Without missing synchronisation all give the same bits.
#pragma once
#include <cstring>
#include <vector>

#include "dev/tests/simt/simt.h"

namespace simt {

// Every schedule, with both extremes of cp.async and two kinds of poison spread over them.
inline std::vector<Options> orders() {
  using S = Schedule;
  using A = Async;
  constexpr uint32_t nan = 0x7fa07fa0, large = 0x7f7f7f7f;  // a finite poison too: fmax(x, NaN) hides a NaN
  return {
      {S::forward, 1, A::at_issue, nan}, {S::forward, 1, A::at_wait, large}, {S::reverse, 1, A::at_issue, large},
      {S::reverse, 1, A::at_wait, nan},  {S::ahead, 1, A::at_issue, nan},    {S::ahead, 1, A::at_wait, nan},
      {S::random, 1, A::at_issue, nan},  {S::random, 2, A::at_wait, nan},    {S::random, 3, A::random, large},
      {S::random, 4, A::random, nan},
  };
}

// Calls run() under each order; it returns a std::vector of plain numbers. Puts the first result into *result and
// returns the order that differed from it, or "".
template <class Run, class Result>
std::string differing_order(Run run, Result* result) {
  const Options before = options();
  std::string differing;
  bool first = true;
  for (const Options& order : orders()) {
    options() = order;
    Result r = run();
    if (first) *result = r;
    first = false;
    const bool equal = r.size() == result->size() && memcmp(r.data(), result->data(), r.size() * sizeof r[0]) == 0;
    if (!equal) {
      differing = describe(order);
      break;
    }
  }
  options() = before;
  return differing;
}

}  // namespace simt
