// Options of ScheduleFreeAdamW. Setters chain: ScheduleFreeAdamWOptions(2.5e-3).warmup_steps(1'000).weight_decay(0.1).
#pragma once

#include <cstdint>

#include <pacer/core/option.h>
#include <pacer/optimizers/optimizer_options.h>

namespace pacer {

// How the weights that the steps leave are averaged.
template <class Own>
struct AveragingOptionsOf {
  // The learning rate rises linearly over so many steps, >= 0, and is whole in the last of them.
  PACER_OPTION(int64_t, warmup_steps) = 0;
  // A step counts in the average as its number to this power, in [0, 16].
  PACER_OPTION(double, r) = 0;
  // The same, times the largest learning rate so far to this power, in [0, 16].
  PACER_OPTION(double, weight_lr_power) = 2;
};

// Schedule-Free AdamW (Defazio et al., arXiv:2405.15682). The first beta must be above 0: it says how much of
// the average the weights of training have. The second is AdamW's.
struct ScheduleFreeAdamWOptions : public FusedOptionsOf<ScheduleFreeAdamWOptions>,
                                  public AveragingOptionsOf<ScheduleFreeAdamWOptions> {
  ScheduleFreeAdamWOptions(double learning_rate = 2.5e-3) { lr(learning_rate); }
};

}  // namespace pacer
