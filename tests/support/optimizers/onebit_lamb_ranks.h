// OneBitLamb on threads as ranks, and the textbook that it must equal.
#pragma once

#include <string>

#include <pacer/optimizers/fused_lamb.h>
#include <pacer/optimizers/onebit_lamb.h>

#include "support/optimizers/onebit_lamb_reference.h"
#include "support/optimizers/onebit_ranks.h"
#include "support/optimizers/onebit_textbooks.h"

namespace pacer::testing {

template <>
struct Family<OneBitLamb> {
  static constexpr const char* kName = "OneBitLamb";
  using Options = OneBitLambOptions;
  using Peer = FusedLamb;
  using Textbook = OneBitLambTextbook;

  // With these the peer takes the steps of warm-up.
  static FusedLambOptions peer_options(const Options& o) {
    return FusedLambOptions(o.lr())
        .betas(o.betas())
        .eps(o.eps())
        .weight_decay(o.weight_decay())
        .bias_correction(o.bias_correction())
        .min_coeff(o.min_coeff())
        .max_coeff(o.max_coeff())
        .adapt(o.adapt());
  }
  // The same options: 1-bit LAMB has no refreshes, because its factors follow the variance.
  static Options refreshed(Options options, int64_t) { return options; }

  static void set_rules(const Options&, OneBitMethodRules&) {}
  static void set_parameter(const Options& options, OneBitLambParameter& p) {
    p.min_coeff = options.min_coeff();
    p.max_coeff = options.max_coeff();
    p.coeff_beta = options.coeff_beta();
    p.factor_min = options.factor_min();
    p.factor_max = options.factor_max();
    p.factor_threshold = options.factor_threshold();
    p.adapt = options.adapt();
  }
  static std::string difference(const OneBitLambParameter& p, const OneBitLamb& optimizer,
                                const Tensor& parameter, const NamedTensors* frozen) {
    if (!p.compress) return "";
    if (optimizer.coefficient(parameter) != p.coefficient()) return "coefficient";
    if (optimizer.factor(parameter) != p.factor) return "factor";
    if (optimizer.momentum_scale(parameter) != static_cast<double>(p.scale)) return "momentum_scale";
    if (frozen == nullptr) return "";
    const auto found = frozen->find(optimizer.parameter_name(parameter) + "/fresh_variance");
    return found != frozen->end() && equals_bits(found->second, p.fresh_variance) ? "" : "fresh_variance";
  }
};
using OneBitLambGroup = OneBitGroup<OneBitLambOptions>;
using OneBitLambRanks = OneBitRanks<OneBitLamb>;

}  // namespace pacer::testing
