// FusedAdam and FusedAdamW: torch::optim::Adam and AdamW with one memory-bound kernel for all parameters
// instead of a loop of small operations. Same rule (to a few units in the last place), same interface, same
// state, same archives.
//
//   pacer::FusedAdamW optimizer(model->parameters(), pacer::FusedAdamWOptions(3e-4).weight_decay(0.1));
//
// Parameters: any shape, count and stride; fp64, fp32, bf16 or fp16; all on one device, CPU or CUDA.
// Parameters whose gradient is undefined sit the step out. Bad input throws InvalidArgument before anything
// is changed: sparse gradients, a tensor given twice (tied weights count once), parameters that share memory,
// devices mixed. On CUDA a step is enqueued on the current stream and does not synchronise; the learning rate
// may change every step, and a step whose gradients keep their addresses can be captured in a CUDA graph.
#pragma once

#include <vector>

#include <pacer/optimizers/adam_options.h>
#include <pacer/optimizers/adam_param_state.h>
#include <pacer/optimizers/fused_optimizer.h>
#include <pacer/optimizers/named_parameters.h>

namespace torch::optim {
class Adam;
class AdamW;
}  // namespace torch::optim

namespace pacer {

// Adam with L2 weight decay (0 by default).
class FusedAdam : public FusedOptimizerOf<FusedAdamOptions> {
 public:
  using FusedOptimizerOf::FusedOptimizerOf;

  // Copies options, moments and step counts of an optimizer over the same parameters, in the same groups and
  // order. Options that torch's optimizer does not have keep their values.
  void take_over(const torch::optim::Adam& source);
};

// AdamW: Adam with decoupled weight decay (0.01 by default).
class FusedAdamW : public FusedOptimizerOf<FusedAdamWOptions> {
 public:
  using FusedOptimizerOf::FusedOptimizerOf;

  // See FusedAdam::take_over.
  void take_over(const torch::optim::AdamW& source);
};

}  // namespace pacer
