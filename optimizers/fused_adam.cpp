#include <pacer/optimizers/fused_adam.h>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <pacer/optimizers/detail/adam_flavour.h>
#include <pacer/optimizers/detail/optimizer_archive.h>

namespace pacer {

using torch::optim::OptimizerParamGroup;

FusedAdam::FusedAdam(const std::vector<OptimizerParamGroup>& groups, FusedAdamOptions defaults)
    : FusedOptimizer(detail::kAdamFlavour, groups, std::make_unique<FusedAdamOptions>(std::move(defaults))) {}
FusedAdam::FusedAdam(std::vector<torch::Tensor> parameters, FusedAdamOptions defaults)
    : FusedAdam({OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}
FusedAdam::FusedAdam(const NamedParameters& parameters, FusedAdamOptions defaults)
    : FusedAdam(std::vector<NamedParamGroup>(1, NamedParamGroup(parameters)), std::move(defaults)) {}
FusedAdam::FusedAdam(const std::vector<NamedParamGroup>& groups, FusedAdamOptions defaults)
    : FusedOptimizer(detail::kAdamFlavour, groups, std::make_unique<FusedAdamOptions>(std::move(defaults))) {}

void FusedAdam::save(torch::serialize::OutputArchive& archive) const {
  adopt_foreign_options();
  torch::optim::serialize<FusedAdamParamState, FusedAdamOptions>(archive, *this);
}
void FusedAdam::load(torch::serialize::InputArchive& archive) {
  restore(detail::read_optimizer<FusedAdamParamState, FusedAdamOptions>(archive, "FusedAdam", param_groups_));
}
void FusedAdam::take_over(const torch::optim::Adam& source) {
  restore(detail::copy_of_torch_optimizer<FusedAdamParamState, torch::optim::AdamParamState>(
      source, detail::kAdamFlavour, param_groups_, names()));
}

FusedAdamW::FusedAdamW(const std::vector<OptimizerParamGroup>& groups, FusedAdamWOptions defaults)
    : FusedOptimizer(detail::kAdamWFlavour, groups,
                     std::make_unique<FusedAdamWOptions>(std::move(defaults))) {}
FusedAdamW::FusedAdamW(std::vector<torch::Tensor> parameters, FusedAdamWOptions defaults)
    : FusedAdamW({OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}
FusedAdamW::FusedAdamW(const NamedParameters& parameters, FusedAdamWOptions defaults)
    : FusedAdamW(std::vector<NamedParamGroup>(1, NamedParamGroup(parameters)), std::move(defaults)) {}
FusedAdamW::FusedAdamW(const std::vector<NamedParamGroup>& groups, FusedAdamWOptions defaults)
    : FusedOptimizer(detail::kAdamWFlavour, groups,
                     std::make_unique<FusedAdamWOptions>(std::move(defaults))) {}

void FusedAdamW::save(torch::serialize::OutputArchive& archive) const {
  adopt_foreign_options();
  torch::optim::serialize<FusedAdamWParamState, FusedAdamWOptions>(archive, *this);
}
void FusedAdamW::load(torch::serialize::InputArchive& archive) {
  restore(
      detail::read_optimizer<FusedAdamWParamState, FusedAdamWOptions>(archive, "FusedAdamW", param_groups_));
}
void FusedAdamW::take_over(const torch::optim::AdamW& source) {
  restore(detail::copy_of_torch_optimizer<FusedAdamWParamState, torch::optim::AdamWParamState>(
      source, detail::kAdamWFlavour, param_groups_, names()));
}

}  // namespace pacer
