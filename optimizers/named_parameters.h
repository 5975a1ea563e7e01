// Parameter groups that carry names. Names make errors readable and are the keys of saved state; LibTorch's
// own groups have none, so their parameters are called "group.index".
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>  // ordered_dict.h needs it and does not say so
#include <torch/csrc/api/include/torch/ordered_dict.h>
#include <torch/optim/optimizer.h>

namespace pacer {

// What torch::nn::Module::named_parameters() returns.
using NamedParameters = torch::OrderedDict<std::string, torch::Tensor>;

// A parameter group with names; without options it takes the optimizer's defaults.
struct NamedParamGroup {
  NamedParamGroup(NamedParameters group_parameters) : parameters(std::move(group_parameters)) {}
  NamedParamGroup(NamedParameters group_parameters,
                  std::unique_ptr<torch::optim::OptimizerOptions> group_options)
      : parameters(std::move(group_parameters)), options(std::move(group_options)) {}
  NamedParamGroup(const NamedParamGroup& other)
      : parameters(other.parameters), options(other.options ? other.options->clone() : nullptr) {}
  NamedParamGroup(NamedParamGroup&&) = default;

  NamedParameters parameters;
  std::unique_ptr<torch::optim::OptimizerOptions> options;
};

}  // namespace pacer
