#include <pacer/modules/detail/layer_targets.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <torch/nn/modules/linear.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/model_modules.h>
#include <pacer/modules/lora.h>

namespace pacer::detail {
namespace {

// What may help who named no layer.
std::string advice(const torch::nn::Module& model, const std::string& target) {
  for (const auto& item : named_modules_of(model)) {
    if (modules::matches_target(item.key(), target) && item.value()->as<torch::nn::LinearImpl>() != nullptr) {
      return concatenate("; ", item.key(),
                         " is a torch::nn::Linear, build the model of pacer::modules::Linear");
    }
  }
  const std::vector<NamedLayer> all = linear_layers(model);
  if (all.empty()) return "; it has no pacer::modules::Linear at all";
  return concatenate("; it has ", all.size(), ", ", all.front().name, " among them");
}

}  // namespace

std::vector<NamedLayer> linear_layers(const torch::nn::Module& model) {
  std::vector<NamedLayer> layers;
  std::unordered_set<const void*> seen;
  for (const auto& item : named_modules_of(model)) {
    auto* layer = item.value()->as<modules::LinearImpl>();
    if (layer != nullptr && seen.insert(layer).second) layers.push_back({item.key(), layer});
  }
  return layers;
}

std::vector<NamedLayer> matching_layers(const char* caller, const torch::nn::Module& model,
                                        const std::vector<std::string>& targets) {
  require(!targets.empty(), caller, " needs targets, the names of layers such as \"*_proj\"",
          advice(model, ""));
  std::vector<NamedLayer> layers = linear_layers(model);
  std::vector<char> matches(layers.size());
  for (const std::string& target : targets) {
    bool found = false;
    for (size_t i = 0; i < layers.size(); ++i) {
      if (!modules::matches_target(layers[i].name, target)) continue;
      matches[i] = 1;
      found = true;
    }
    require(found, caller, ": the target \"", target, "\" matches no pacer::modules::Linear of the model",
            advice(model, target));
  }
  size_t next = 0;
  layers.erase(
      std::remove_if(layers.begin(), layers.end(), [&](const NamedLayer&) { return !matches[next++]; }),
      layers.end());
  return layers;
}

void check_changeable(const char* caller, const torch::nn::Module& model,
                      const std::vector<NamedLayer>& layers) {
  std::unordered_map<const void*, std::vector<std::string>> names;
  for (const auto& item : model.named_parameters()) {
    names[item.value().unsafeGetTensorImpl()].push_back(item.key());
  }
  for (const NamedLayer& layer : layers) {
    require(!layer.layer->is_merged(), caller, ": the adapter of ", layer.name,
            " is merged; unmerge() first");
    if (!layer.layer->weight.defined()) continue;
    const auto& tied = names[layer.layer->weight.unsafeGetTensorImpl()];
    require(tied.size() <= 1, caller, ": the weight of ", layer.name, " is also ",
            tied.empty()                             ? ""
            : tied.front() == layer.name + ".weight" ? tied.back()
                                                     : tied.front(),
            "; leave tied layers out of the targets");
  }
}

}  // namespace pacer::detail
