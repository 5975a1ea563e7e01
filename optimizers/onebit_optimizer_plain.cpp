// The step of a 1-bit optimizer without a Session, which would have added gradients over the ranks.
#include <algorithm>
#include <memory>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/gradient_bucketer.h>
#include <pacer/core/error.h>
#include <pacer/optimizers/detail/onebit_setup.h>
#include <pacer/optimizers/detail/parameter_list.h>
#include <pacer/optimizers/detail/step_agreement.h>
#include <pacer/optimizers/onebit_optimizer.h>

namespace pacer {

// Compares what ranks are about to do, adds over them what has to be added, and says how to make it a mean. A
// parameter without a gradient on any rank has none afterwards, and so sits the step out as with a single
// rank; one that only some ranks have a gradient of counts as zero on the others.
StepInputs OneBitOptimizer::plain_step_inputs() {
  require(!onebit_->overlap_backward(), name(),
          ": overlap_backward(true) needs a Session, which knows the last backward of a step; leave it out");
  if (world_->world_size() == 1) return {};
  require_intact();
  adopt_foreign_options();
  world_->set_step(attempts_);
  const std::vector<torch::Tensor> without = alone_.agreement->without_gradient(*world_, attempts_, view());
  update_bucketer();
  alone_.bucketer->set_scope(gradient_scope());
  fill_missing();
  alone_.bucketer->reduce();
  alone_.bucketer->wait();
  for (const torch::Tensor& parameter : without) parameter.mutable_grad() = torch::Tensor();
  StepInputs inputs;
  inputs.local_weight = world_->world_size() * alone_.bucketer->scale();
  inputs.average = 1.0 / inputs.local_weight;
  return inputs;
}

// Parameters that only other ranks have a gradient of count as zero here.
void OneBitOptimizer::fill_missing() {
  const auto lacks = [](const torch::Tensor& parameter) { return !parameter.grad().defined(); };
  if (std::none_of(alone_.reduced.begin(), alone_.reduced.end(), lacks)) return;
  const at::NoGradGuard no_grad;
  std::unordered_set<const void*> local;
  if (gradient_scope() != GradientScope::world) {
    for (const torch::Tensor& parameter : local_parameters()) local.insert(parameter.unsafeGetTensorImpl());
  }
  for (const torch::Tensor& parameter : alone_.reduced) {
    if (!lacks(parameter) || local.count(parameter.unsafeGetTensorImpl()) != 0) continue;
    parameter.mutable_grad() = at::zeros_like(parameter);
  }
}

// A new one where parameters were frozen, unfrozen, added or removed.
void OneBitOptimizer::update_bucketer() {
  std::vector<torch::Tensor> reduced = detail::trained_parameters(param_groups_);
  if (alone_.bucketer != nullptr && detail::same_tensors(reduced, alone_.reduced)) return;
  std::vector<GradientBucketer::NamedParameter> named;
  for (const torch::Tensor& parameter : reduced) {
    const std::string name = parameter_name(parameter);
    named.emplace_back(detail::concatenate(detail::InMessage{name, parameter.sizes()}), parameter);
  }
  alone_.bucketer.reset();  // takes its hooks from the parameters before the next one adds its own
  alone_.bucketer = std::make_unique<GradientBucketer>(named, world_, BucketOptions(), local_parameters());
  alone_.reduced = std::move(reduced);
}

}  // namespace pacer
