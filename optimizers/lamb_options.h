// Options of FusedLamb. Setters chain: FusedLambOptions(2e-3).weight_decay(0.01).max_coeff(0.3).
#pragma once

#include <pacer/optimizers/optimizer_options.h>

namespace pacer {

// The options of LAMB and 1-bit LAMB.
template <class Own>
struct LambOptionsOf {
  // The trust ratio |parameter| / |update| is kept between these; 0 <= min_coeff <= max_coeff.
  PACER_OPTION(double, min_coeff) = 0.01;
  PACER_OPTION(double, max_coeff) = 10;
  // False: the trust ratio is 1; in 1-bit LAMB coefficient and factor are. Customary for biases and the
  // parameters of normalisations.
  PACER_OPTION(bool, adapt) = true;
};

// LAMB (You et al., arXiv:1904.00962, algorithm 2).
struct FusedLambOptions : public FusedOptionsOf<FusedLambOptions>, public LambOptionsOf<FusedLambOptions> {
  FusedLambOptions(double learning_rate = 1e-3) { lr(learning_rate).eps(1e-6).weight_decay(1e-2); }
};

}  // namespace pacer
