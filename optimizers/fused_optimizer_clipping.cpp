// Gradients that are clipped by their norm without a Session.
#include <algorithm>
#include <cmath>
#include <memory>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/optimizer_traits.h>
#include <pacer/optimizers/fused_optimizer.h>
#include <pacer/optimizers/gradient_guard.h>

namespace pacer {

void FusedOptimizer::clip_gradient_norm(double max_norm) {
  (void)engine();  // is there
  require(std::isfinite(max_norm) && max_norm >= 0, traits_->name,
          ": clip_gradient_norm needs a finite norm, or 0 for none, not ", max_norm);
  require(max_norm == 0 || !has_own_ranks(), traits_->name,
          ": clip_gradient_norm knows one rank's gradients, and this optimizer's ranks clip together; use "
          "GradientClipping in a Session");
  max_norm_ = max_norm;
  if (clipping_ && max_norm > 0) clipping_->clip_to(max_norm);
}

double FusedOptimizer::gradient_norm() const {
  require(max_norm_ != 0, traits_->name,
          ": gradient_norm is known where clip_gradient_norm has set a norm; call that first");
  return clipping_ ? clipping_->read().norm : 0;
}

StepInputs FusedOptimizer::clipped_step_inputs() {
  StepInputs inputs = plain_step_inputs();
  const auto first = std::find_if(param_groups_.begin(), param_groups_.end(),
                                  [](const auto& group) { return !group.params().empty(); });
  if (first == param_groups_.end()) return inputs;
  const at::Device device = first->params()[0].device();
  if (clipping_ == nullptr || clipping_->device() != device) {
    clipping_ = std::make_shared<GradientGuard>(device);
    clipping_->clip_to(max_norm_);
  }
  inputs.guard = clipping_;
  return inputs;
}

}  // namespace pacer
