// What is made for every strategy, once, and not in every file that includes the header.
#include "mcf/convert.h"

#include "runtime/error.h"
#include "runtime/options.h"

PrecisionName parse_precision(const char* flag, const std::string& text, const std::string& default_mode) {
  const size_t colon = text.find(':');
  const PrecisionName name{text, text.substr(0, colon), colon == text.npos ? default_mode : text.substr(colon + 1)};
  const bool known_mode = name.mode == "strict" || name.mode == "fused" || name.mode == "as-released";
  if (!known_mode || !with_strategy(name.precision, name.mode, [&]<class S>() {}))
    USAGE_ERROR("--%s: found %s, expected a --precision, perhaps with a --mcf: collage_plus or collage_plus:fused",
                flag, in_quotes(text).c_str());
  return name;
}

StateSlice empty_slice(const PrecisionName& name, size_t n) {
  StateSlice slice;
  with_strategy(name.precision, name.mode, [&]<class S>() { slice = empty_slice<S>(n); });
  return slice;
}

StateSlice convert(const StateSlice& slice, const PrecisionName& from, const PrecisionName& to, Changes& changes) {
  FullValues before, after;
  StateSlice next;
  with_strategy(from.precision, from.mode, [&]<class S>() { before = full_values<S>(slice); });
  with_strategy(to.precision, to.mode, [&]<class S>() {
    next = stored_values<S>(before);
    // Weights that are stored alike stay: kahan's and int8's theta is not always the nearest to the full value.
    const bool theta_stays = slice[1].name == next[1].name;
    for (auto& into : next)
      for (const auto& have : slice)
        if (into.name == have.name && into.dtype == have.dtype && (into.name != "theta" || theta_stays))
          into.bytes = have.bytes;
    after = full_values<S>(next);
  });
  const auto compare = [](Changes::Change& change, const std::vector<double>& was, const std::vector<double>& is) {
    for (size_t i = 0; i < was.size(); i++) {
      change.rounded += is[i] != was[i];
      change.error += (is[i] - was[i]) * (is[i] - was[i]), change.size += was[i] * was[i];
    }
  };
  compare(changes.weight, before.weight, after.weight);
  compare(changes.m, before.m, after.m), compare(changes.v, before.v, after.v);
  changes.elements += static_cast<double>(before.weight.size());
  return next;
}
