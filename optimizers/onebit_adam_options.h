// Options of OneBitAdam. Setters chain:
// OneBitAdamOptions(1e-3).freeze_step(2'000).refresh_variance_every(32).
#pragma once

#include <pacer/optimizers/onebit_options.h>
#include <pacer/optimizers/optimizer_options.h>

namespace pacer {

// 1-bit Adam (Tang et al., arXiv:2102.02888), with decoupled weight decay.
struct OneBitAdamOptions : public OptimizerOptionsOf<OneBitAdamOptions>,
                           public OneBitOptionsOf<OneBitAdamOptions> {
  OneBitAdamOptions(double learning_rate = 1e-3) { lr(learning_rate).weight_decay(1e-2).block_scales(true); }

  // ---- Options of the optimizer: the same in all groups. ----

  // Every K-th step after the freeze travels in full precision and brings the variance up to date; 0: never.
  TORCH_ARG(int64_t, refresh_variance_every) = 0;
};

}  // namespace pacer
