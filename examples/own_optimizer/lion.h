// Lion as an optimizer of pacer.
#pragma once

#include <pacer/optimizers/own_rule.h>

// A constant of the program.
const pacer::OwnRule& lion_rule();

// The defaults of the paper. Its rates are 3 to 10 times smaller than Adam's, its weight decay as much larger.
inline pacer::OwnRuleOptions lion_options(double learning_rate = 1e-4) {
  // Lion does not correct its moment for the start at zero.
  return pacer::OwnRuleOptions(lion_rule(), learning_rate).betas({0.9, 0.99}).bias_correction(false);
}

class Lion : public pacer::OwnRuleOptimizer {
 public:
  using FusedOptimizerOf::FusedOptimizerOf;
};
