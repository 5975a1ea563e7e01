// OneBitAdam on threads as ranks, and the textbook that it must equal.
#pragma once

#include <string>

#include <pacer/optimizers/onebit_adam.h>

#include "support/optimizers/onebit_adam_reference.h"
#include "support/optimizers/onebit_ranks.h"
#include "support/optimizers/onebit_textbooks.h"

namespace pacer::testing {

template <>
struct Family<OneBitAdam> {
  static constexpr const char* kName = "OneBitAdam";
  using Options = OneBitAdamOptions;
  using Peer = FusedAdamW;
  using Textbook = OneBitAdamTextbook;

  // With these the peer takes the steps of warm-up.
  static FusedAdamWOptions peer_options(const Options& o) {
    return FusedAdamWOptions(o.lr())
        .betas(o.betas())
        .eps(o.eps())
        .weight_decay(o.weight_decay())
        .bias_correction(o.bias_correction());
  }
  // The same options with every K-th step in full precision.
  static Options refreshed(Options options, int64_t every) { return options.refresh_variance_every(every); }

  static void set_rules(const Options& options, OneBitAdamRules& rules) {
    rules.refresh_every = options.refresh_variance_every();
  }
  static void set_parameter(const Options&, OneBitMethodParameter&) {}
  static std::string difference(const OneBitMethodParameter&, const OneBitAdam&, const Tensor&,
                                const NamedTensors*) {
    return "";
  }
};
using OneBitAdamGroup = OneBitGroup<OneBitAdamOptions>;
using OneBitAdamRanks = OneBitRanks<OneBitAdam>;

}  // namespace pacer::testing
