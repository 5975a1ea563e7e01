#include <pacer/optimizers/fused_adam.h>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <pacer/optimizers/detail/optimizer_archive.h>
#include <pacer/optimizers/detail/optimizer_traits.h>

namespace pacer {

using torch::optim::OptimizerParamGroup;

FusedAdam::FusedAdam(const std::vector<OptimizerParamGroup>& groups, FusedAdamOptions defaults)
    : FusedOptimizer(detail::kAdamTraits, groups, std::make_unique<FusedAdamOptions>(std::move(defaults))) {}
FusedAdam::FusedAdam(std::vector<torch::Tensor> parameters, FusedAdamOptions defaults)
    : FusedAdam({OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}
FusedAdam::FusedAdam(const NamedParameters& parameters, FusedAdamOptions defaults)
    : FusedAdam(std::vector<NamedParamGroup>(1, NamedParamGroup(parameters)), std::move(defaults)) {}
FusedAdam::FusedAdam(const std::vector<NamedParamGroup>& groups, FusedAdamOptions defaults)
    : FusedOptimizer(detail::kAdamTraits, groups, std::make_unique<FusedAdamOptions>(std::move(defaults))) {}

void FusedAdam::take_over(const torch::optim::Adam& source) {
  restore(detail::copy_of_torch_optimizer<torch::optim::AdamParamState>(source, traits(), param_groups_,
                                                                        *defaults_, names()));
}

FusedAdamW::FusedAdamW(const std::vector<OptimizerParamGroup>& groups, FusedAdamWOptions defaults)
    : FusedOptimizer(detail::kAdamWTraits, groups, std::make_unique<FusedAdamWOptions>(std::move(defaults))) {
}
FusedAdamW::FusedAdamW(std::vector<torch::Tensor> parameters, FusedAdamWOptions defaults)
    : FusedAdamW({OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}
FusedAdamW::FusedAdamW(const NamedParameters& parameters, FusedAdamWOptions defaults)
    : FusedAdamW(std::vector<NamedParamGroup>(1, NamedParamGroup(parameters)), std::move(defaults)) {}
FusedAdamW::FusedAdamW(const std::vector<NamedParamGroup>& groups, FusedAdamWOptions defaults)
    : FusedOptimizer(detail::kAdamWTraits, groups, std::make_unique<FusedAdamWOptions>(std::move(defaults))) {
}

void FusedAdamW::take_over(const torch::optim::AdamW& source) {
  restore(detail::copy_of_torch_optimizer<torch::optim::AdamWParamState>(source, traits(), param_groups_,
                                                                         *defaults_, names()));
}

}  // namespace pacer
