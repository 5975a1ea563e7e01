#include <pacer/checkpoints/detail/merged_weights.h>

#include <pacer/checkpoints/detail/linear_names.h>
#include <pacer/core/error.h>

namespace pacer::detail {

NamedTensors without_merged(torch::nn::Module& model, NamedTensors tensors) {
  for (const auto& [name, layer] : lora_names(model)) {
    if (!layer->is_merged()) continue;
    const auto found = tensors.find(name.empty() ? "weight" : name + ".weight");
    if (found == tensors.end()) continue;
    require(layer->is_unmergeable(), "the weight of \"", name,
            "\" was written to since its adapter was merged, so that it cannot be saved as it was before; "
            "unmerge() before training, or remove_adapter(), which leaves what was merged in the weight");
    found->second = layer->weight_before_merge();
  }
  return tensors;
}

void require_unmerged(torch::nn::Module& model, const std::string& cannot) {
  for (const auto& [name, layer] : lora_names(model)) {
    require(!layer->is_merged(), cannot, "the adapter of \"", name,
            "\" is merged into its weight; unmerge() the model first");
  }
}

std::string active_adapters(torch::nn::Module& model) {
  std::string text;
  for (const auto& [name, layer] : lora_names(model)) {
    if (layer->adapters().empty()) continue;
    const std::vector<modules::LoraAdapter> active = layer->active_adapters();
    text += name;
    if (active.empty()) text += '\t';
    for (const modules::LoraAdapter& adapter : active) text += '\t' + adapter->options.name();
    text += '\n';
  }
  return text;
}

}  // namespace pacer::detail
