#include <pacer/optimizers/onebit_lamb.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/compressed_parameters.h>
#include <pacer/optimizers/detail/optimizer_view.h>

namespace pacer {

using torch::optim::OptimizerParamGroup;

const OptimizerParamGroup& OneBitLamb::group_of(const torch::Tensor& parameter) const {
  for (const detail::RegisteredParameter& own : view().parameters()) {
    if (own.tensor.is_same(parameter)) return param_groups_[own.group];
  }
  throw InvalidArgument("OneBitLamb: this tensor is none of its parameters; pass one of them");
}

double OneBitLamb::coefficient(const torch::Tensor& parameter) const {
  const OptimizerParamGroup& group = group_of(parameter);
  const auto state = state_.find(parameter.unsafeGetTensorImpl());
  if (state == state_.end()) return 1;
  const auto* fields = dynamic_cast<const FusedAdamStateFields*>(state->second.get());
  if (fields == nullptr || !fields->trust_average().defined()) return 1;  // its group is not compressed
  const auto& average = fields->trust_average();
  const detail::GroupSettings settings = traits().settings(group.options());
  const bool is_corrected = compressed() != nullptr && settings.compresses(parameter);  // since the freeze
  return is_corrected ? detail::mean_trust(average) : detail::corrected_trust(average, settings.kernel);
}

double OneBitLamb::factor(const torch::Tensor& parameter) const {
  group_of(parameter);
  return compressed() == nullptr ? 1 : compressed()->lamb_numbers(parameter_name(parameter)).factor;
}

double OneBitLamb::momentum_scale(const torch::Tensor& parameter) const {
  group_of(parameter);
  return compressed() == nullptr ? 1 : compressed()->lamb_numbers(parameter_name(parameter)).momentum_scale;
}

}  // namespace pacer
