// The look at gradients ahead of the step: each parameter has its own places among the partial sums, so that
// it makes no difference when they are filled, nor by how many launches.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/device/detail/seen_tensor.h>
#include <pacer/optimizers/detail/step_plan.h>

namespace pacer::detail {

class EarlyLook {
 public:
  // Whether looks may come before the next step: the plan and its units are where the kernels need them.
  void allow(bool allowed) { is_allowed_ = allowed; }
  // See SessionOptimizer::look_early. Fills the partial sums of these parameters.
  bool look(StepPlan& plan, const std::vector<at::Tensor>& parameters);
  // Whether every gradient was seen as it is now, so that all partial sums are there; forgets what was seen.
  bool take(const StepPlan& plan);
  void forget();

 private:
  std::vector<SeenTensor> seen_;  // by entry: gradients whose partial sums are there
  bool has_seen_ = false;         // any of them
  bool is_allowed_ = false;
};

}  // namespace pacer::detail
