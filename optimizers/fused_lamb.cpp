#include <pacer/optimizers/fused_lamb.h>

#include <pacer/optimizers/detail/optimizer_traits.h>

namespace pacer {

using torch::optim::OptimizerParamGroup;

FusedLamb::FusedLamb(const std::vector<OptimizerParamGroup>& groups, FusedLambOptions defaults)
    : FusedOptimizer(detail::kLambTraits, groups, std::make_unique<FusedLambOptions>(std::move(defaults))) {}
FusedLamb::FusedLamb(std::vector<torch::Tensor> parameters, FusedLambOptions defaults)
    : FusedLamb({OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}
FusedLamb::FusedLamb(const NamedParameters& parameters, FusedLambOptions defaults)
    : FusedLamb(std::vector<NamedParamGroup>(1, NamedParamGroup(parameters)), std::move(defaults)) {}
FusedLamb::FusedLamb(const std::vector<NamedParamGroup>& groups, FusedLambOptions defaults)
    : FusedOptimizer(detail::kLambTraits, groups, std::make_unique<FusedLambOptions>(std::move(defaults))) {}

double FusedLamb::trust_ratio(const torch::Tensor& parameter) const { return trust_ratio_of(parameter); }

}  // namespace pacer
