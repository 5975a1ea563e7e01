// The parameters that an optimizer lists: what ranks compare of them, and whether they are still the same.
//
// That they are the same is asked for different reasons, and so of different things. Whoever adds up gradients
// asks it of the trained ones (are_trained, same_tensors). Of the whole list GradientWatch asks whether the tensors are the
// same, ParameterWatch also who needs a gradient, and StepAgreement also for groups, dtypes and layouts
// (is_list). The engine asks whether tensors, states and gradients are where its plan has them (step_walk.cpp).
#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/agreement.h>
#include <pacer/optimizers/detail/optimizer_view.h>
#include <pacer/optimizers/tensor_names.h>

namespace pacer::detail {

// Those that need a gradient, in order.
std::vector<at::Tensor> trained_parameters(const ParamGroups& groups);
bool same_tensors(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);
// The same of the list and trained_parameters(groups), which is asked around each pass and makes no list.
bool are_trained(const std::vector<at::Tensor>& list, const ParamGroups& groups);

// Returns whether the groups have as many parameters as the list, and is_same(item, parameter, group) says yes
// for each.
template <class Item, class IsSame>
bool is_list(const std::vector<Item>& list, const ParamGroups& groups, const IsSame& is_same) {
  auto item = list.begin();
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const at::Tensor& parameter : groups[g].params()) {
      if (item == list.end() || !is_same(*item++, parameter, g)) return false;
    }
  }
  return item == list.end();
}

// A parameter as it was, without its memory.
struct SeenParameter {
  explicit SeenParameter(const at::Tensor& parameter)
      : address(parameter.getIntrusivePtr()), requires_grad(parameter.requires_grad()) {}
  const void* key() const { return address._unsafe_get_target(); }
  bool is(const at::Tensor& parameter) const {
    return key() == parameter.unsafeGetTensorImpl() && requires_grad == parameter.requires_grad();
  }

  HeldAddress address;
  bool requires_grad;
};

// Names, dtypes, shapes, memory order, groups, and whether they are trained; in order.
std::vector<Fact> parameter_facts(const std::vector<RegisteredParameter>& parameters);

}  // namespace pacer::detail
