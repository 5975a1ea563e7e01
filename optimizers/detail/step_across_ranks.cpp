#include <pacer/optimizers/detail/step_across_ranks.h>

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <pacer/collectives/gradient_bucketer.h>
#include <pacer/core/error.h>
#include <pacer/optimizers/detail/parameter_list.h>

namespace pacer::detail {
namespace {

std::unordered_set<const void*> keys_of(const std::vector<at::Tensor>& tensors) {
  std::unordered_set<const void*> keys;
  for (const at::Tensor& tensor : tensors) keys.insert(tensor.unsafeGetTensorImpl());
  return keys;
}

}  // namespace

StepAcrossRanks::StepAcrossRanks(std::shared_ptr<Communicator> world) : world_(std::move(world)) {}
StepAcrossRanks::~StepAcrossRanks() = default;

StepInputs StepAcrossRanks::inputs(const OptimizerView& optimizer, int64_t attempts,
                                   const std::vector<at::Tensor>& local, GradientScope scope) {
  StepInputs inputs;
  if (world_->world_size() == 1) return inputs;
  world_->set_step(attempts);
  const std::vector<at::Tensor> without = agreement_.without_gradient(*world_, attempts, optimizer);
  inputs.local_weight = world_->world_size() * add_gradients(optimizer, local, scope);
  for (const at::Tensor& parameter : without) parameter.mutable_grad() = at::Tensor();
  inputs.average = 1.0 / inputs.local_weight;
  return inputs;
}

// Returns what the sums were multiplied with. There are none where all gradients stay with their rank.
double StepAcrossRanks::add_gradients(const OptimizerView& optimizer, const std::vector<at::Tensor>& local,
                                      GradientScope scope) {
  std::unordered_set<const void*> staying;
  if (scope != GradientScope::world) staying = keys_of(local);
  const auto stays = [&](const at::Tensor& parameter) {
    return !parameter.requires_grad() || staying.count(parameter.unsafeGetTensorImpl()) != 0;
  };
  const bool all_stay = scope == GradientScope::rank &&
                        std::all_of(optimizer.groups.begin(), optimizer.groups.end(), [&](const auto& group) {
                          return std::all_of(group.params().begin(), group.params().end(), stays);
                        });
  if (all_stay) return 1;
  update_bucketer(optimizer, local);
  bucketer_->set_scope(scope);
  fill_missing(staying);
  bucketer_->reduce();
  bucketer_->wait();
  return bucketer_->scale();
}

// Parameters that only other ranks have a gradient of count as zero here.
void StepAcrossRanks::fill_missing(const std::unordered_set<const void*>& local) const {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : reduced_) {
    if (parameter.grad().defined() || local.count(parameter.unsafeGetTensorImpl()) != 0) continue;
    parameter.mutable_grad() = at::zeros_like(parameter);
  }
}

// A new one where parameters were frozen, unfrozen, added or removed.
void StepAcrossRanks::update_bucketer(const OptimizerView& optimizer, const std::vector<at::Tensor>& local) {
  std::vector<at::Tensor> reduced = trained_parameters(optimizer.groups);
  if (bucketer_ != nullptr && same_tensors(reduced, reduced_)) return;
  std::vector<GradientBucketer::NamedParameter> named;
  for (const RegisteredParameter& parameter : optimizer.parameters()) {
    if (!parameter.tensor.requires_grad()) continue;
    named.emplace_back(concatenate(parameter.in_message()), parameter.tensor);
  }
  bucketer_.reset();  // takes its hooks from the parameters before the next one adds its own
  bucketer_ = std::make_unique<GradientBucketer>(named, world_, BucketOptions(), local);
  reduced_ = std::move(reduced);
}

}  // namespace pacer::detail
