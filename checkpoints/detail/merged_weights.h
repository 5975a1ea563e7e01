// Weights of a model that hold the product of an adapter (pacer::modules::merge), where files hold the
// adapter beside them, and which adapters each layer has active.
#pragma once

#include <string>

#include <torch/nn/module.h>

#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

// In place of weights that are merged, what unmerge() restores: beside them lie their adapters, which would
// count twice. InvalidArgument for a weight that was written to since it was merged.
NamedTensors without_merged(torch::nn::Module& model, NamedTensors tensors);

// InvalidArgument that begins with `cannot` and names a layer where one is merged.
void require_unmerged(torch::nn::Module& model, const std::string& cannot);

// A line for each layer with adapters, sorted: its name, and a tab before the name of each active one; a tab and
// nothing where none is. Empty for a model without adapters.
std::string active_adapters(torch::nn::Module& model);

}  // namespace pacer::detail
