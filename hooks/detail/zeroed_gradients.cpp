#include <pacer/hooks/detail/zeroed_gradients.h>

#include <unordered_set>

#include <ATen/ops/zeros_like.h>
#include <torch/nn/module.h>

#include <pacer/hooks/detail/model_facts.h>
#include <pacer/modules/fp8_scaling.h>

namespace pacer::detail {

void forget_micro_batch(const SessionParts& parts) {
  if (parts.fp8_scaling) parts.fp8_scaling->forget_since_mark();
}

void ZeroedGradients::Scope::set(bool on) {
  if (is_on_ != nullptr) *is_on_ = on;
  if (scaling_ != nullptr) scaling_->record(!on);
}

ZeroedGradients::~ZeroedGradients() {
  for (const auto& [parameter, position] : hooked_) parameter.remove_hook(position);
}

void ZeroedGradients::watch(const at::Tensor& parameter) {
  const auto zeroed = [is_on = is_on_](const at::Tensor& gradient) {
    return *is_on && gradient.defined() ? at::zeros_like(gradient) : gradient;
  };
  hooked_.emplace_back(parameter, parameter.register_hook(zeroed));
}

// Hooks stay where they are: to remove one leaves its place behind, and there may be a pass in every step.
ZeroedGradients::Scope ZeroedGradients::scope(const SessionParts& parts, bool wanted) {
  if (!wanted) return Scope(nullptr, nullptr);
  std::unordered_set<const void*> known;
  for (const auto& item : hooked_) known.insert(item.first.unsafeGetTensorImpl());
  std::vector<at::Tensor> parameters = parts.model().parameters();
  for (const at::Tensor& parameter : all_optimizer_parameters(parts)) parameters.push_back(parameter);
  for (const at::Tensor& parameter : parameters) {
    if (parameter.defined() && parameter.requires_grad() &&
        known.insert(parameter.unsafeGetTensorImpl()).second) {
      watch(parameter);
    }
  }
  return Scope(is_on_.get(), parts.fp8_scaling.get());
}

}  // namespace pacer::detail
