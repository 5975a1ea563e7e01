// The pacer::modules::Linear of a model, and the layers that take adapters, by name.
#pragma once

#include <map>
#include <string>

#include <torch/nn/module.h>

#include <pacer/modules/linear.h>
#include <pacer/modules/lora_layer.h>

namespace pacer::detail {

// All of them; one that has several names under each. The model itself has the empty name. Unlike
// named_modules() it does not ask that the model be held by a shared_ptr.
template <class Layer>
std::map<std::string, Layer*> layers_by_name(torch::nn::Module& model) {
  std::map<std::string, Layer*> layers;
  if (auto* layer = model.as<Layer>()) layers.emplace("", layer);
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    if (auto* layer = item.value()->template as<Layer>()) layers.emplace(item.key(), layer);
  }
  return layers;
}

inline std::map<std::string, modules::LinearImpl*> linear_names(torch::nn::Module& model) {
  return layers_by_name<modules::LinearImpl>(model);
}

// Those that take adapters, pacer::modules::Linear and others.
inline std::map<std::string, modules::LoraLayer*> lora_names(torch::nn::Module& model) {
  return layers_by_name<modules::LoraLayer>(model);
}

}  // namespace pacer::detail
