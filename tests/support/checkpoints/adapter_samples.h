// Adapters of a FileNet, and the file of options that lies beside their matrices.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <pacer/modules/lora.h>

#include "support/checkpoints/weight_files.h"

namespace pacer::testing {

// A FileNet with an adapter whose matrices are all random.
inline FileNet adapted(const modules::LoraOptions& options, uint64_t seed = 1) {
  torch::manual_seed(seed);
  FileNet model;
  modules::add_lora(*model, options);
  const torch::NoGradGuard no_grad;
  for (const auto& [name, tensor] : detail::model_tensors(*model)) {
    if (name.find(".lora_") != std::string::npos) tensor.normal_();
  }
  return model;
}

inline modules::LoraOptions some_options() {
  return modules::LoraOptions(3).alpha(6.5).dropout(0.25).rslora(true).targets({"block.up", "block.down"});
}

// The options in the folder of an adapter.
inline nlohmann::json config_in(const std::string& folder) {
  return nlohmann::json::parse(content_of(folder + "/adapter_config.json"));
}

}  // namespace pacer::testing
