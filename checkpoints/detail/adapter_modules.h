// What of a model belongs to an adapter beside its matrices: modules that were trained with it, and those
// with running statistics, which go on while it is trained.
#pragma once

#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

struct AdapterModules {
  std::vector<std::string> names;  // sorted; none is part of another
  NamedTensors tensors;            // all parameters and buffers of these modules, by their names in the model
};

// Returns what belongs to the adapter called `name`. InvalidArgument that names a trained parameter which is
// neither in an adapter nor in a module that PEFT could keep whole: one of the model itself, and one of a
// layer with an adapter or of a module that has such layers. Running statistics of that kind are left out,
// with a warning that names them.
AdapterModules modules_beside(torch::nn::Module& model, const std::string& name);

}  // namespace pacer::detail
