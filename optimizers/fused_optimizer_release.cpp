// The step of a fused optimizer whose parameters are updated one by one, while backward runs.
#include <algorithm>
#include <string>

#include <ATen/core/grad_mode.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/optimizer_traits.h>
#include <pacer/optimizers/detail/optimizer_view.h>
#include <pacer/optimizers/detail/step_engine.h>
#include <pacer/optimizers/fused_optimizer.h>

namespace pacer {

std::string FusedOptimizer::unreleased_reason() const {
  if (traits_->is_onebit)
    return "its ranks compress the momentum of many parameters together; use FusedAdamW";
  if (traits_->has_matrices)
    return "it orthogonalises all matrices of one shape in one product; use FusedAdamW";
  const auto settings = detail::settings_of(*traits_, param_groups_);
  const auto any = [&](const auto& is_so) { return std::any_of(settings.begin(), settings.end(), is_so); };
  if (any([](const auto& of_group) { return of_group.kernel.rule == kernels::UpdateRule::lamb; }))
    return "LAMB's ratios are made for all tensors at once; use FusedAdamW";
  if (any([](const auto& of_group) { return of_group.finite_check; }))
    return "its option finite_check looks at all gradients before the first update; leave that option out";
  if (is_clipping())
    return "clip_gradient_norm needs the norm of all gradients before the first update; leave that call out";
  if (engine().is_paged())
    return "its state is paged, and a page has parts of several parameters; leave out paged(), and take "
           "state_bits(8) to save memory";
  if (is_shared_out()) return "ranks share its parameters out; leave out Shards";
  if (engine().has_visible_rows())
    return "set_visible_rows is for steps over all parameters; call it with an undefined tensor";
  return "";
}

void FusedOptimizer::begin_release(const StepInputs& inputs) {
  const std::string reason = unreleased_reason();
  require(reason.empty(), "GradientRelease does not go with ", traits_->name, ", because ", reason);
  require<Error>(inputs.guard == nullptr, traits_->name, ": begin_release was given a guard");
  const at::NoGradGuard no_grad;
  adopt_foreign_options();
  engine().begin_release(param_groups_, detail::settings_of(*traits_, param_groups_), state_, names_, inputs);
}

void FusedOptimizer::release(const torch::Tensor& parameter, ReleasedParameters& released) {
  const at::NoGradGuard no_grad;
  engine().release(parameter, released);
}

void FusedOptimizer::end_release(bool has_failed, ReleasedParameters& released) {
  const at::NoGradGuard no_grad;
  engine().end_release(has_failed, released);
}

}  // namespace pacer
