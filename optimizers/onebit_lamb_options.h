// Options of OneBitLamb. Setters chain:
// OneBitLambOptions(2e-3).freeze_step(2'000).max_coeff(0.3).
#pragma once

#include <pacer/optimizers/lamb_options.h>
#include <pacer/optimizers/onebit_options.h>

namespace pacer {

// 1-bit LAMB (Li et al., arXiv:2104.06069, algorithm 1).
struct OneBitLambOptions : public OptimizerOptionsOf<OneBitLambOptions>,
                           public LambOptionsOf<OneBitLambOptions>,
                           public OneBitOptionsOf<OneBitLambOptions> {
  OneBitLambOptions(double learning_rate = 1e-3) {
    lr(learning_rate).eps(1e-6).weight_decay(1e-2).bias_correction(false);
  }

  // In warm-up the trust ratios are averaged with this decay rate, in [0, 1); after the freeze their mean is
  // the tensor's coefficient.
  TORCH_ARG(double, coeff_beta) = 0.9;
  // A factor multiplies the coefficient: how much the variance would have changed since the freeze. It stays
  // between factor_min and factor_max, 0 < factor_min <= factor_max. Above 1 it raises the rate (the paper: 4).
  TORCH_ARG(double, factor_min) = 0.5;
  TORCH_ARG(double, factor_max) = 1.0;
  // From one step to the next the factor changes by at most this share, in [0, 1).
  TORCH_ARG(double, factor_threshold) = 0.1;
};

}  // namespace pacer
