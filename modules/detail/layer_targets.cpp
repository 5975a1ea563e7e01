#include <pacer/modules/detail/layer_targets.h>

#include <algorithm>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>

#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/model_modules.h>
#include <pacer/modules/lora.h>

namespace pacer::detail {
namespace {

template <class Layer>
constexpr bool kTakesAdapters = std::is_same_v<Layer, modules::LoraLayer>;

// What the layers are called that a function takes.
template <class Layer>
constexpr const char* kKinds =
    kTakesAdapters<Layer> ? "pacer::modules::Linear, Conv1d, Conv2d, Conv3d or Embedding"
                          : "pacer::modules::Linear";

// The name of the layer that could have been one of pacer's; null for another module.
const char* torch_kind(const torch::nn::Module& module, bool takes_adapters) {
  if (module.as<torch::nn::LinearImpl>() != nullptr) return "Linear";
  if (!takes_adapters) return nullptr;
  if (module.as<torch::nn::Conv1dImpl>() != nullptr) return "Conv1d";
  if (module.as<torch::nn::Conv2dImpl>() != nullptr) return "Conv2d";
  if (module.as<torch::nn::Conv3dImpl>() != nullptr) return "Conv3d";
  if (module.as<torch::nn::EmbeddingImpl>() != nullptr) return "Embedding";
  return nullptr;
}

// What may help who named no layer.
template <class Layer>
std::string advice(const torch::nn::Module& model, const std::string& target) {
  for (const auto& item : named_modules_of(model)) {
    if (!modules::matches_target(item.key(), target)) continue;
    const char* kind = torch_kind(*item.value(), kTakesAdapters<Layer>);
    if (kind == nullptr) continue;
    return concatenate("; ", item.key(), " is a torch::nn::", kind,
                       ", build the model of pacer::modules::", kind);
  }
  const std::vector<NamedLayerOf<Layer>> all = layers_of<Layer>(model);
  if (all.empty()) return concatenate("; it has no ", kKinds<Layer>, " at all");
  return concatenate("; it has ", all.size(), ", ", all.front().name, " among them");
}

}  // namespace

template <class Layer>
std::vector<NamedLayerOf<Layer>> layers_of(const torch::nn::Module& model) {
  std::vector<NamedLayerOf<Layer>> layers;
  std::unordered_set<const void*> seen;
  for (const auto& item : named_modules_of(model)) {
    auto* layer = item.value()->template as<Layer>();
    if (layer != nullptr && seen.insert(layer).second) layers.push_back({item.key(), layer});
  }
  return layers;
}

template <class Layer>
std::vector<NamedLayerOf<Layer>> matching_layers(const char* caller, const torch::nn::Module& model,
                                                 const std::vector<std::string>& targets) {
  require(!targets.empty(), caller, " needs targets, the names of layers such as \"*_proj\"",
          advice<Layer>(model, ""));
  std::vector<NamedLayerOf<Layer>> layers = layers_of<Layer>(model);
  std::vector<char> matches(layers.size());
  for (const std::string& target : targets) {
    bool found = false;
    for (size_t i = 0; i < layers.size(); ++i) {
      if (!modules::matches_target(layers[i].name, target)) continue;
      matches[i] = 1;
      found = true;
    }
    require(found, caller, ": the target \"", target, "\" matches no ", kKinds<Layer>, " of the model",
            advice<Layer>(model, target));
  }
  size_t next = 0;
  layers.erase(std::remove_if(layers.begin(), layers.end(), [&](const auto&) { return !matches[next++]; }),
               layers.end());
  return layers;
}

template <class Layer>
void check_changeable(const char* caller, const torch::nn::Module& model,
                      const std::vector<NamedLayerOf<Layer>>& layers) {
  std::unordered_map<const void*, std::vector<std::string>> names;
  for (const auto& item : model.named_parameters()) {
    names[item.value().unsafeGetTensorImpl()].push_back(item.key());
  }
  for (const auto& [name, layer] : layers) {
    require(!layer->is_merged(), caller, ": the adapter of ", name, " is merged; unmerge() first");
    const auto tied = names.find(layer->stored_weight().unsafeGetTensorImpl());
    if (tied == names.end()) continue;  // in 4 bits
    require(tied->second.size() <= 1, caller, ": the weight of ", name, " is also ",
            tied->second.front() == name + ".weight" ? tied->second.back() : tied->second.front(),
            "; leave tied layers out of the targets");
  }
}

template std::vector<NamedLinear> layers_of(const torch::nn::Module&);
template std::vector<NamedLayer> layers_of(const torch::nn::Module&);
template std::vector<NamedLinear> matching_layers(const char*, const torch::nn::Module&,
                                                  const std::vector<std::string>&);
template std::vector<NamedLayer> matching_layers(const char*, const torch::nn::Module&,
                                                 const std::vector<std::string>&);
template void check_changeable(const char*, const torch::nn::Module&, const std::vector<NamedLinear>&);
template void check_changeable(const char*, const torch::nn::Module&, const std::vector<NamedLayer>&);

}  // namespace pacer::detail
