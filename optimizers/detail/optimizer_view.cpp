#include <pacer/optimizers/detail/optimizer_view.h>

#include <pacer/core/error.h>

namespace pacer::detail {

std::string name_of(const ParameterNames& names, const at::Tensor& parameter, size_t group, size_t index) {
  const auto found = names.find(parameter.unsafeGetTensorImpl());
  return found != names.end() ? found->second : concatenate(group, ".", index);
}

std::vector<RegisteredParameter> registered(const ParamGroups& groups, const ParameterNames& names) {
  std::vector<RegisteredParameter> all;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& parameters = groups[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      all.push_back({parameters[i], g, i, name_of(names, parameters[i], g, i)});
    }
  }
  return all;
}

std::unique_ptr<torch::optim::OptimizerOptions> adopt(const OptimizerTraits& traits,
                                                      const torch::optim::OptimizerOptions& options,
                                                      const torch::optim::OptimizerOptions& own,
                                                      size_t group) {
  auto adopted = traits.adopt(options, own);
  require(adopted != nullptr, traits.name, ": the options of group ", group,
          " belong to another optimizer; use ", traits.name, "Options");
  traits.settings(*adopted);
  return adopted;
}

}  // namespace pacer::detail
