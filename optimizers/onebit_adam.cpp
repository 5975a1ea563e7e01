#include <pacer/optimizers/onebit_adam.h>

#include <utility>

#include <pacer/optimizers/detail/optimizer_traits.h>
namespace pacer {

using torch::optim::OptimizerParamGroup;

OneBitAdam::OneBitAdam(const std::vector<OptimizerParamGroup>& groups, OneBitAdamOptions defaults,
                       std::shared_ptr<Communicator> world)
    : OneBitOptimizer(detail::kOneBitAdamTraits, groups,
                      std::make_unique<OneBitAdamOptions>(std::move(defaults)), std::move(world)) {}
OneBitAdam::OneBitAdam(std::vector<torch::Tensor> parameters, OneBitAdamOptions defaults,
                       std::shared_ptr<Communicator> world)
    : OneBitAdam({OptimizerParamGroup(std::move(parameters))}, std::move(defaults), std::move(world)) {}
OneBitAdam::OneBitAdam(const NamedParameters& parameters, OneBitAdamOptions defaults,
                       std::shared_ptr<Communicator> world)
    : OneBitAdam(std::vector<NamedParamGroup>(1, NamedParamGroup(parameters)), std::move(defaults),
                 std::move(world)) {}
OneBitAdam::OneBitAdam(const std::vector<NamedParamGroup>& groups, OneBitAdamOptions defaults,
                       std::shared_ptr<Communicator> world)
    : OneBitOptimizer(detail::kOneBitAdamTraits, groups,
                      std::make_unique<OneBitAdamOptions>(std::move(defaults)), std::move(world)) {}

}  // namespace pacer
