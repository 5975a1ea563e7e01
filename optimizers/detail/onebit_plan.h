// What a 1-bit optimizer is to do beside its rule: when to freeze, and how to compress.
#pragma once

#include <vector>

#include <pacer/optimizers/detail/optimizer_traits.h>

namespace pacer::detail {

struct OneBitPlan : OneBitChoices {
  std::vector<bool> compressed;  // by group
  double beta2 = 0.999;          // of the first compressed group, as the next
  bool bias_correction = true;

  // What must stay as it was from the first step on. Before the freeze groups may come to the end.
  bool exchanges_like(const OneBitPlan& earlier) const;
};

// Checked; throws InvalidArgument where groups differ or options contradict each other.
OneBitPlan onebit_plan(const OptimizerTraits& traits, const ParamGroups& groups,
                       const std::vector<AdamGroupSettings>& settings);

}  // namespace pacer::detail
