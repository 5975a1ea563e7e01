// The layers of a model that targets name, and what keeps a layer from being changed.
#pragma once

#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <pacer/modules/linear.h>
#include <pacer/modules/lora_layer.h>

namespace pacer::detail {

// Layer: modules::LinearImpl, or modules::LoraLayer for all that take adapters.
template <class Layer>
struct NamedLayerOf {
  std::string name;
  Layer* layer;
};
using NamedLinear = NamedLayerOf<modules::LinearImpl>;
using NamedLayer = NamedLayerOf<modules::LoraLayer>;

// All of the kind, each once.
template <class Layer>
std::vector<NamedLayerOf<Layer>> layers_of(const torch::nn::Module& model);

// Those that match. `caller` is for messages. InvalidArgument where there are no targets, and for one that
// matches none.
template <class Layer>
std::vector<NamedLayerOf<Layer>> matching_layers(const char* caller, const torch::nn::Module& model,
                                                 const std::vector<std::string>& targets);

// InvalidArgument for layers that cannot get an adapter or another storage: merged ones, and those whose weight
// another name has, too.
template <class Layer>
void check_changeable(const char* caller, const torch::nn::Module& model,
                      const std::vector<NamedLayerOf<Layer>>& layers);

}  // namespace pacer::detail
