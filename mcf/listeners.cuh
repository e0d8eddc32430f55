// Optimizers that listen to one gradient: the run's own and those of --lockstep. What an update of each lost, and the
// change of one into another precision.
#pragma once
#include <algorithm>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "mcf/adamw.cuh"
#include "mcf/shadow.cuh"
#include "runtime/comm.h"
#include "runtime/options.h"
#include "runtime/record.h"

inline std::vector<PrecisionName> lockstep_names(const Options& o) {
  std::vector<PrecisionName> names;
  std::istringstream list(o.lockstep);
  for (std::string name; std::getline(list, name, ',');) {
    names.push_back(parse_precision("lockstep", name, o.mcf));
    for (size_t i = 0; i + 1 < names.size(); i++)
      if (names[i].text == name) USAGE_ERROR("--lockstep: found %s twice", in_quotes(name).c_str());
  }
  return names;
}

// An optimizer and the weights that it updates: the model's, or a copy of them.
template <class floatX>
struct Listener {
  std::string prefix;  // of its keys in metrics.jsonl; "" for the run's own
  PrecisionName precision;
  floatX* params;
  std::unique_ptr<Optimizer<floatX>> optimizer;
  Buffer<floatX> copy;
};

// Throws UsageError where weights and gradients of that precision are no floatX.
template <class floatX>
void require_type(const char* flag, const PrecisionName& name) {
  with_strategy(name.precision, name.mode, [&]<class S>() {
    if (!std::is_same_v<typename S::Theta, floatX>)
      USAGE_ERROR("--%s: %s has %s weights and gradients, this run has %s; fp32 goes with none of the others", flag,
                  name.text.c_str(), sizeof(floatX) == 2 ? "fp32" : "bf16", sizeof(floatX) == 2 ? "bf16" : "fp32");
  });
}

// --switch=STEP:PRECISION.
struct Switch {
  int64_t step;  // after so many; -1 = never
  PrecisionName to;
};
template <class floatX>
Switch parse_switch(const Options& o) {
  if (o.switch_precision.empty() || o.eval_only) return {-1, {}};
  const size_t colon = o.switch_precision.find(':'), digits = o.switch_precision.find_first_not_of("0123456789");
  const int64_t step = colon > 0 && colon < 12 && digits == colon ? std::stoll(o.switch_precision) : 0;
  if (step < 1 || step >= o.steps)
    USAGE_ERROR("--switch: found %s, expected STEP:PRECISION with a step from 1 to %lld",
                in_quotes(o.switch_precision).c_str(), static_cast<long long>(o.steps - 1));
  const PrecisionName to = parse_precision("switch", o.switch_precision.substr(colon + 1), o.mcf);
  require_type<floatX>("switch", to);
  return {step, to};
}

// The run's own optimizer, in precision `own`, first, then those of --lockstep. params: the initial weights, a flat
// buffer of so many elements.
template <class floatX>
std::vector<Listener<floatX>> make_listeners(const Options& o, const PrecisionName& own, floatX* params,
                                             size_t elements, const BlockList& blocks, const Part& part,
                                             Device& device) {
  std::vector<Listener<floatX>> listeners;
  listeners.push_back({"", own, params, make_optimizer(own.precision, own.mode, params, blocks, part, device), {}});
  for (const PrecisionName& name : lockstep_names(o)) {
    Listener<floatX> l{"lockstep." + name.text + ".", name, nullptr, nullptr, {}};
    require_type<floatX>("lockstep", name);
    l.optimizer = make_optimizer(name.precision, name.mode, params, blocks, part, device);
    l.copy = Buffer<floatX>(device, Memory::states, elements);
    l.params = l.copy;
    std::vector<floatX> initial(elements);
    device.download(initial.data(), params, elements);
    device.upload(l.params, initial.data(), elements);
    listeners.push_back(std::move(l));
  }
  return listeners;
}

inline void add_quality(Record& r, const std::string& prefix, const QualitySums& q) {
  r.add_if_computed(prefix + "edq", q.edq()).add_if_computed(prefix + "edq_hi", q.edq_hi());
  r.add(prefix + "update_norm", q.update_norm()).add(prefix + "effective_norm", q.effective_norm());
  r.add(prefix + "effective_norm_hi", q.effective_norm_hi()).add(prefix + "lost_frac", q.lost_frac());
  r.add(prefix + "lost_frac_hi", q.lost_frac_hi()).add(prefix + "lost_decay_frac", q.lost_decay_frac());
  r.add(prefix + "stale_v_frac", q.stale_v_frac());
}

inline void add_drift(Record& r, const std::string& prefix, const std::vector<DriftSums>& blocks) {
  DriftSums d;
  for (const auto& block : blocks) d += block;
  r.add_if_computed(prefix + "drift_theta", drift(d.weight, d.travelled));
  r.add_if_computed(prefix + "drift_m", drift(d.m, d.m_size));
  r.add_if_computed(prefix + "drift_v", drift(d.v, d.v_size));
}

// Lines that say what was rounded, of all ranks.
inline std::string changes_text(const Changes& changes, Comm& comm) {
  std::string lines;
  const double elements = comm.sum(changes.elements);
  const auto add = [&](const char* name, const Changes::Change& c) {
    const double rounded = comm.sum(c.rounded), error = comm.sum(c.error), size = comm.sum(c.size);
    lines += rounded == 0 ? strf("\n           %s exact", name)
                          : strf("\n           %s rounded in %.3g %% of all, error %.1e of the norm", name,
                                 100 * rounded / elements, std::sqrt(error / size));
  };
  add("weights", changes.weight), add("m", changes.m), add("v", changes.v);
  return lines;
}

// Makes the listener's optimizer one of another precision that goes on from the same weights and moments. Returns lines
// that say what was rounded.
template <class floatX>
std::string switch_precision(Listener<floatX>& l, const PrecisionName& to, const BlockList& blocks, const Part& part,
                             Device& device, Comm& comm) {
  auto next = make_optimizer(to.precision, to.mode, l.params, blocks, part, device);
  Changes changes;
  for (size_t begin = part.begin, n; begin < part.end; begin += n) {
    n = std::min(part.end - begin, size_t{1} << 20);
    next->write(l.params, begin, convert(l.optimizer->read(l.params, begin, n, device), l.precision, to, changes),
                device);
  }
  l.optimizer = std::move(next), l.precision = to;
  return "now in " + to.text + changes_text(changes, comm);
}
