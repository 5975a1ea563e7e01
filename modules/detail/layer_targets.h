// The layers of a model that targets name, and what keeps a layer from being changed.
#pragma once

#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <pacer/modules/linear.h>

namespace pacer::detail {

struct NamedLayer {
  std::string name;
  modules::LinearImpl* layer;
};

// All pacer::modules::Linear, each once.
std::vector<NamedLayer> linear_layers(const torch::nn::Module& model);

// Those that match. `caller` is for messages. InvalidArgument where there are no targets, and for one that
// matches none.
std::vector<NamedLayer> matching_layers(const char* caller, const torch::nn::Module& model,
                                        const std::vector<std::string>& targets);

// InvalidArgument for layers that cannot get an adapter or another storage: merged ones, and those whose weight
// another name has, too.
void check_changeable(const char* caller, const torch::nn::Module& model,
                      const std::vector<NamedLayer>& layers);

}  // namespace pacer::detail
