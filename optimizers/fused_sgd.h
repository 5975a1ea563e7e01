// FusedSgd: torch::optim::SGD with one memory-bound kernel for all parameters instead of a loop of small operations.
//
//   pacer::FusedSgd optimizer(model->parameters(), pacer::FusedSgdOptions(0.1).momentum(0.9).weight_decay(5e-4));
//
//   g += weight_decay * p                     m = g in the first step, then momentum * m + (1 - dampening) * g
//   p -= lr * m, or lr * (g + momentum * m) with Nesterov's momentum, or lr * g where momentum is 0
//
// Values are those of torch::optim::SGD, to the bit where a CPU has fused multiply-adds. The state is the momentum buffer
// alone; where momentum is 0 it has no tensors. A buffer begins with the first gradient of its parameter, whenever that comes,
// and anew where a momentum is set that was 0 before. Everything else is as in fused_adam.h: parameters of any shape, stride
// and dtype, on one device; those without a gradient sit the step out; bad input throws InvalidArgument before anything is
// changed; on CUDA a step never synchronises and can be captured in a CUDA graph.
#pragma once

#include <pacer/optimizers/adam_param_state.h>
#include <pacer/optimizers/fused_optimizer.h>
#include <pacer/optimizers/named_parameters.h>
#include <pacer/optimizers/sgd_options.h>

namespace torch::optim {
class SGD;
}  // namespace torch::optim

namespace pacer {

class FusedSgd : public FusedOptimizerOf<FusedSgdOptions> {
 public:
  using FusedOptimizerOf::FusedOptimizerOf;

  // Copies options and momentum buffers of an optimizer over the same parameters, in the same groups and order. Options that
  // torch's optimizer does not have keep their values.
  void take_over(const torch::optim::SGD& source);
};

}  // namespace pacer
