// The pacer::modules::Linear of a model by name.
#pragma once

#include <map>
#include <string>

#include <torch/nn/module.h>

#include <pacer/modules/linear.h>

namespace pacer::detail {

// All of them; one that has several names under each. The model itself has the empty name. Unlike
// named_modules() it does not ask that the model be held by a shared_ptr.
inline std::map<std::string, modules::LinearImpl*> linear_names(torch::nn::Module& model) {
  std::map<std::string, modules::LinearImpl*> layers;
  if (auto* layer = model.as<modules::LinearImpl>()) layers.emplace("", layer);
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    if (auto* layer = item.value()->as<modules::LinearImpl>()) layers.emplace(item.key(), layer);
  }
  return layers;
}

}  // namespace pacer::detail
