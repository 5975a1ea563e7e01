#include <pacer/optimizers/detail/optimizer_view.h>

#include <ostream>

#include <pacer/core/error.h>

namespace pacer::detail {

const std::string* given_name(const TensorNames& names, const at::Tensor& parameter) {
  const auto found = names.find(parameter.unsafeGetTensorImpl());
  return found == names.end() ? nullptr : &found->second.second;
}

std::string name_of(const TensorNames& names, const at::Tensor& parameter, size_t group, size_t index) {
  const std::string* given = given_name(names, parameter);
  return given ? *given : concatenate(group, ".", index);
}

std::ostream& operator<<(std::ostream& out, const InMessage& parameter) {
  const std::string& name = parameter.name;
  const size_t dot = name.find('.');
  const auto is_number = [](const std::string& text) {
    return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  };
  if (dot == std::string::npos || !is_number(name.substr(0, dot)) || !is_number(name.substr(dot + 1))) {
    return out << name;
  }
  out << name.substr(dot + 1) << " of group " << name.substr(0, dot) << " (";
  if (parameter.sizes) out << "shape " << *parameter.sizes << "; ";
  return out << "make the optimizer of named_parameters() to see names)";
}

std::vector<RegisteredParameter> registered(const ParamGroups& groups, const TensorNames& names) {
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
