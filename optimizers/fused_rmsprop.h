// FusedRmsprop: torch::optim::RMSprop with one memory-bound kernel for all parameters instead of a loop of small operations.
//
//   pacer::FusedRmsprop optimizer(model->parameters(), pacer::FusedRmspropOptions(1e-3).alpha(0.9).momentum(0.9));
//
//   g += weight_decay * p
//   v = alpha * v + (1 - alpha) * g^2         a = alpha * a + (1 - alpha) * g, where it is centered
//   u = g / (sqrt(v) + eps), or g / (sqrt(v - a^2) + eps) where it is centered
//   p -= lr * u, or with a momentum m = momentum * m + u, p -= lr * m
//
// Values are those of torch::optim::RMSprop to a few units in the last place; but where rounding makes v - a^2 negative, torch
// has NaN, and this counts it as 0. The state is v, a where a group is centered, and m where it has a momentum. What a group
// gets later begins at zero; the momentum is let go where it is set to 0. Everything else is as in fused_adam.h: parameters of
// any shape, stride and dtype, on one device; those without a gradient sit the step out; bad input throws InvalidArgument
// before anything is changed; on CUDA a step never synchronises and can be captured in a CUDA graph.
#pragma once

#include <pacer/optimizers/adam_param_state.h>
#include <pacer/optimizers/fused_optimizer.h>
#include <pacer/optimizers/named_parameters.h>
#include <pacer/optimizers/rmsprop_options.h>

namespace torch::optim {
class RMSprop;
}  // namespace torch::optim

namespace pacer {

class FusedRmsprop : public FusedOptimizerOf<FusedRmspropOptions> {
 public:
  using FusedOptimizerOf::FusedOptimizerOf;

  // Copies options, means, momentum and step counts of an optimizer over the same parameters, in the same groups and order.
  // Options that torch's optimizer does not have keep their values.
  void take_over(const torch::optim::RMSprop& source);
};

}  // namespace pacer
