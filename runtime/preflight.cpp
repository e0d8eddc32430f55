#include "runtime/preflight.h"

#include <cmath>
#include <cstdint>

#include "mcf/strategies.h"
#include "runtime/error.h"
#include "runtime/terminal.h"

namespace {

// What the warnings ask of a strategy.
struct Storage {
  const char* precision;
  int resolution;   // an update u reaches the weight theta if |u| >= 2^-resolution |theta|
  bool stochastic;  // below that it reaches it in the mean
  bool bf16_v;      // the second moment is one bf16 number, rounded to nearest
};

Storage storage_of(const Options& o) {
  Storage storage{};
  with_strategy(o.precision, o.mcf, [&]<class S>() {
    constexpr size_t moments = std::tuple_size_v<typename S::States> - S::second_moment;
    using V = std::tuple_element_t<S::second_moment, typename S::States>;
    storage = {S::name, S::resolution, S::stochastic, !S::stochastic && moments == 1 && std::is_same_v<V, bf16>};
  });
  return storage;
}

constexpr double init_std = 0.02;  // of all matrices but the residual projections, which are smaller

// The share of weights from N(0, init_std) that an update of `lr` is too small for.
double stuck_share(double lr, int resolution) {
  return std::erfc(std::ldexp(lr, resolution) / (init_std * std::sqrt(2.0)));
}

// What keeps such a change, as a part of the weight, of the precisions finer than 2^-resolution.
std::string finer(int resolution, double change) {
  if (resolution < 17 && change >= 0x1p-17) return "collage_plus (2^-17) or fp32_master (2^-24)";
  return resolution < 24 ? "fp32_master (2^-24)" : "a larger value";
}

}  // namespace

std::vector<std::string> preflight_warnings(const Options& o) {
  if (o.eval_only) return {};
  if (o.lr == 0) return {"--lr=0: no weight will change; the default is 3e-4"};
  std::vector<std::string> warnings;
  const Storage storage = storage_of(o);
  const char* precision = storage.precision;

  if (o.steps > 0 && o.warmup_steps >= o.steps)
    warnings.push_back(strf("--warmup-steps=%lld: the run ends after %lld steps, while it warms up. Choose fewer",
                            static_cast<long long>(o.warmup_steps), static_cast<long long>(o.steps)));

  if (storage.bf16_v && o.beta2 > 0.98) {
    const char* why = rn(static_cast<float>(o.beta2)) == 1.0f
                          ? "rounds to 1 in bf16: the second moment of %s can grow but not shrink, and steps become "
                            "too small"
                          : "is more than one bf16 number can follow: the second moment of %s drifts by up to 13 %%";
    warnings.push_back(strf("--beta2=%g ", o.beta2) + strf(why, precision) +
                       ". Choose collage_plus or fp32_master, or --beta2=0.98 or less");
  }

  if (o.mcf == "as-released" && o.precision == "collage_plus")
    warnings.push_back(
        "--mcf=as-released: the second moment is a third to a half of what it should be, and steps are "
        "too large. It is there to compare with published runs; choose --mcf=strict otherwise");

  const double resolved = std::ldexp(1.0, -storage.resolution), decay = o.lr * o.weight_decay;
  if (decay > 0 && decay < resolved && !storage.stochastic)
    warnings.push_back(
        strf("--weight-decay=%g: lr * wd is %.2g, and %s keeps changes from 2^-%d of a weight on: where "
             "the gradient is small, decay is lost. Choose %s",
             o.weight_decay, decay, precision, storage.resolution, finer(storage.resolution, decay).c_str()));

  // At a final learning rate of 0 everything stands still, in every precision.
  const double final_lr = o.lr_schedule == "constant" || o.final_lr_frac == 0 ? o.lr : o.lr * o.final_lr_frac;
  if (final_lr < resolved && !storage.stochastic) {
    const auto stuck = [&](double lr) { return 100 * stuck_share(lr, storage.resolution); };
    warnings.push_back(
        strf("--lr=%g: %s keeps changes from 2^-%d of a weight on, and those of AdamW are at most about "
             "lr. LayerNorm weights (1) can't move%s, and of weights from N(0, %g) %.0f %% can't at the "
             "peak, %.0f %% at the final lr %.2g. Choose %s",
             o.lr, precision, storage.resolution, o.lr < resolved ? "" : " at the end", init_std, stuck(o.lr),
             stuck(final_lr), final_lr, finer(storage.resolution, final_lr).c_str()));
  }
  return warnings;
}

std::string preflight_text(const Options& o) {
  std::string text;
  for (const std::string& warning : preflight_warnings(o)) {
    std::string lines = wrapped(warning, 105);
    for (size_t i = 0; (i = lines.find('\n', i)) != std::string::npos; i += 12) lines.insert(i + 1, 11, ' ');
    text += "warning    " + lines + "\n";
  }
  return text;
}
