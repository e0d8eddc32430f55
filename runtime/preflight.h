// What the flags alone say will be lost: warnings before a run, never a reason to stop it.
#pragma once
#include <string>
#include <vector>

#include "runtime/options.h"

// One sentence or two each, with what to choose instead. o.steps may be 0 (not known yet).
//   - no weight will change (lr 0), or the learning rate never comes down (warm-up as long as the run)
//   - a second moment of one bf16 number that can't shrink, since beta2 rounds to 1, or drifts, from beta2 > .98 on
//   - the second moment of --mcf=as-released
//   - decay, lr * wd at the peak, below what the weight resolves
//   - LayerNorm weights, and a share of the others, that can't move at the peak or the final learning rate
std::vector<std::string> preflight_warnings(const Options& o);

// The same as lines of the header, at most 120 columns; "" where there is nothing to warn of.
std::string preflight_text(const Options& o);
