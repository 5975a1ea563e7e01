#include <pacer/optimizers/detail/parameter_list.h>

#include <algorithm>
#include <string>

#include <pacer/collectives/detail/tensor_text.h>
#include <pacer/core/error.h>

namespace pacer::detail {

std::vector<at::Tensor> trained_parameters(const ParamGroups& groups) {
  std::vector<at::Tensor> trained;
  for (const auto& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
  }
  return trained;
}

bool are_trained(const std::vector<at::Tensor>& list, const ParamGroups& groups) {
  auto item = list.begin();
  for (const auto& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.requires_grad() && (item == list.end() || !(item++)->is_same(parameter))) return false;
    }
  }
  return item == list.end();
}

bool same_tensors(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return x.is_same(y); });
}

std::vector<Fact> parameter_facts(const std::vector<RegisteredParameter>& parameters) {
  std::vector<Fact> facts;
  for (const auto& [tensor, group, index, name] : parameters) {
    facts.push_back({concatenate("parameter ", facts.size()),
                     concatenate(name, ", ", tensor_text(tensor), tensor.requires_grad() ? "" : ", frozen",
                                 group == 0 ? "" : concatenate(", group ", group))});
  }
  facts.push_back({"number of parameters", std::to_string(facts.size())});
  return facts;
}

}  // namespace pacer::detail
