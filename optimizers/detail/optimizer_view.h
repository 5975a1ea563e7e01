// An optimizer as those see it that save, load, compare or check all of it: its parameters by name and place,
// their states, and options as its own type.
#pragma once

#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/parameter_range.h>
#include <pacer/optimizers/detail/optimizer_traits.h>
#include <pacer/optimizers/tensor_names.h>

namespace pacer::detail {

// The name that the parameter was given; null where it has none.
const std::string* given_name(const TensorNames& names, const at::Tensor& parameter);

// The given name, else "group.index", which is the key of its state.
std::string name_of(const TensorNames& names, const at::Tensor& parameter, size_t group, size_t index);

// How a message speaks of a parameter, made only where the message is: by its name, or, where it has but a
// place, by that, its shape and the way to names. (A torch::nn::ParameterList has names such as "0.1", too;
// by name alone the two cannot be told apart.)
struct InMessage {
  const std::string& name;  // of name_of
  std::optional<at::IntArrayRef> sizes = std::nullopt;
};
std::ostream& operator<<(std::ostream& out, const InMessage& parameter);

struct RegisteredParameter {
  at::Tensor tensor;
  size_t group;
  size_t index;  // in the group
  std::string name;

  void* key() const { return tensor.unsafeGetTensorImpl(); }  // of its state
  InMessage in_message() const { return {name, tensor.sizes()}; }
};

// All parameters in the order of registration.
std::vector<RegisteredParameter> registered(const ParamGroups& groups, const TensorNames& names);

// The options as the optimizer's own type, checked; what torch's lack is as in `own`. Throws InvalidArgument
// where they belong to another optimizer.
std::unique_ptr<torch::optim::OptimizerOptions> adopt(const OptimizerTraits& traits,
                                                      const torch::optim::OptimizerOptions& options,
                                                      const torch::optim::OptimizerOptions& own,
                                                      size_t group);

struct OptimizerView {
  const OptimizerTraits& traits;
  const ParamGroups& groups;
  const ParamStates& states;
  const torch::optim::OptimizerOptions& defaults;
  const TensorNames& names;
  const ParameterRanges& ranges;
  bool state_on_host = false;  // paged: an import stays on the CPU

  std::vector<RegisteredParameter> parameters() const { return registered(groups, names); }
  // What is updated of the parameter; null for all of it.
  const ParameterRange* range_of(const RegisteredParameter& parameter) const {
    const auto found = ranges.find(parameter.key());
    return found == ranges.end() ? nullptr : &found->second;
  }
  // A copy of a group's options, adopted.
  std::unique_ptr<torch::optim::OptimizerOptions> options(size_t group) const {
    return adopt(traits, groups[group].options(), defaults, group);
  }
};

}  // namespace pacer::detail
