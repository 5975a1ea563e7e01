// The optimizers that take steps with released gradients: forms of the registered ones that do not look at all gradients
// first.
#pragma once

#include <vector>

#include "support/session/registry.h"

namespace pacer::testing {

inline std::vector<RegisteredOptimizer> releasing_optimizers() {
  const FusedAdamWOptions adamw = FusedAdamWOptions(0.01).weight_decay(0.1);
  const auto stochastic =
      FusedAdamWOptions(adamw).master_weights(MasterWeights::none).rounding(Rounding::stochastic);
  const auto sgd = FusedSgdOptions(0.01).momentum(0.9).dampening(0.2).weight_decay(0.1);
  const auto rmsprop = FusedRmspropOptions(0.002).alpha(0.9).weight_decay(0.1);
  return {
      {"FusedAdamW", true, making<FusedAdamW>(adamw)},
      {"FusedAdam amsgrad", true, making<FusedAdam>(FusedAdamOptions(0.01).weight_decay(0.1).amsgrad(true))},
      {"FusedAdamW bf16 remainder", true, making<FusedAdamW>(adamw), at::kBFloat16},
      {"FusedAdamW bf16 master", true,
       making<FusedAdamW>(FusedAdamWOptions(adamw).master_weights(MasterWeights::fp32)), at::kBFloat16},
      {"FusedAdamW bf16 stochastic", true, making<FusedAdamW>(stochastic), at::kBFloat16},
      {"FusedAdamW 8 bits", true, making<FusedAdamW>(FusedAdamWOptions(adamw).state_bits(8))},
      {"FusedAdam bf16 8 bits", true,
       making<FusedAdam>(FusedAdamOptions(0.01).weight_decay(0.1).state_bits(8)), at::kBFloat16},
      {"FusedAdamW bf16 8 bits, 8-bit remainder", true,
       making<FusedAdamW>(FusedAdamWOptions(adamw).state_bits(8).master_weights(MasterWeights::remainder_8)),
       at::kBFloat16},
      {"FusedSgd", true, making<FusedSgd>(sgd)},
      {"FusedSgd maximize", true, making<FusedSgd>(FusedSgdOptions(sgd).maximize(true))},
      {"FusedSgd of two kinds", true, making_two_kinds<FusedSgd>(sgd, FusedSgdOptions(sgd).momentum(0))},
      {"FusedRmsprop", true,
       making_two_kinds<FusedRmsprop>(FusedRmspropOptions(rmsprop).momentum(0.5).centered(true), rmsprop)},
      {"ScheduleFreeAdamW", true,
       making<ScheduleFreeAdamW>(ScheduleFreeAdamWOptions(0.01).weight_decay(0.1).warmup_steps(3)),
       at::kFloat, false, false, true},
      {"Lion", true, making<Lion>(lion_options(0.01).weight_decay(0.1))},
  };
}

}  // namespace pacer::testing
