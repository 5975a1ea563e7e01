// A model of four groups of parameters for tests of clipping: with frozen ones, some that no gradient reaches, and
// some without elements.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include "support/optimizers/optimizers.h"

namespace pacer::testing {

struct FourGroupsImpl : torch::nn::Module {
  explicit FourGroupsImpl(at::ScalarType dtype) {
    torch::manual_seed(5);
    const std::vector<std::vector<std::vector<int64_t>>> shapes{
        {{6, 64}, {3}, {0, 3}}, {{64}}, {{32, 4}, {5}}, {{7}}};
    for (size_t g = 0; g < shapes.size(); ++g) {
      groups.emplace_back();
      for (size_t i = 0; i < shapes[g].size(); ++i) {
        const Tensor value = torch::randn(shapes[g][i], at::kDouble).to(dtype);
        groups[g].push_back(register_parameter("p" + std::to_string(g) + "_" + std::to_string(i), value));
        directions.push_back(torch::randn(shapes[g][i], at::kDouble).to(dtype));
      }
    }
    groups[0][1].requires_grad_(false);
  }
  // Its gradients are those directions times the mean of x. None reaches group 3.
  Tensor loss(const Tensor& x) {
    Tensor sum;
    size_t number = 0;
    for (size_t g = 0; g < groups.size(); ++g) {
      for (const Tensor& parameter : groups[g]) {
        const Tensor product = (parameter * directions[number++]).sum();
        if (g < 3) sum = sum.defined() ? sum + product : product;
      }
    }
    return sum * x.mean();
  }

  std::vector<std::vector<Tensor>> groups;
  std::vector<Tensor> directions;
};
TORCH_MODULE(FourGroups);

template <class Options>
std::vector<torch::optim::OptimizerParamGroup> groups_of(const FourGroupsImpl& model,
                                                         const Options& options) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const std::vector<Tensor>& parameters : model.groups)
    groups.emplace_back(parameters, std::make_unique<Options>(options));
  return groups;
}

}  // namespace pacer::testing
