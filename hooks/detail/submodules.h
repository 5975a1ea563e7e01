// Whether a module that a hook acts on belongs to the Session's model.
#pragma once

#include <algorithm>
#include <string>

#include <torch/nn/module.h>

#include <pacer/core/error.h>

namespace pacer::detail {

inline bool is_in_model(const torch::nn::Module& model, const torch::nn::Module& module) {
  const auto modules = model.modules(/*include_self=*/false);
  return &model == &module ||
         std::any_of(modules.begin(), modules.end(), [&](const auto& part) { return part.get() == &module; });
}

inline void require_in_model(const torch::nn::Module& model, const torch::nn::Module& blocks,
                             const std::string& hook) {
  require(is_in_model(model, blocks), "the Blocks given to ", hook,
          " are no part of the Session's model; in the model's constructor call register_module(\"blocks\", "
          "blocks)");
}

}  // namespace pacer::detail
