#include <pacer/modules/lora.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <unordered_set>

#include <pacer/core/error.h>
#include <pacer/modules/detail/layer_targets.h>

namespace pacer::modules {
namespace {

using detail::NamedLayer;

std::vector<NamedLayer> lora_layers(const torch::nn::Module& model) {
  return detail::layers_of<LoraLayer>(model);
}

// "*" any text without a dot, "**" any text, "?" one character.
bool matches_pattern(std::string_view text, std::string_view pattern) {
  if (pattern.empty()) return text.empty();
  if (pattern.front() != '*') {
    const bool fits =
        !text.empty() && (pattern.front() == '?' ? text.front() != '.' : pattern.front() == text.front());
    return fits && matches_pattern(text.substr(1), pattern.substr(1));
  }
  const bool takes_dots = pattern.substr(0, 2) == "**";
  const std::string_view rest = pattern.substr(takes_dots ? 2 : 1);
  for (size_t taken = 0;; ++taken) {
    if (matches_pattern(text.substr(taken), rest)) return true;
    if (taken == text.size() || (!takes_dots && text[taken] == '.')) return false;
  }
}

void check_lora_options(const LoraOptions& options) {
  require(options.r() >= 1, "LoraOptions::r must be at least 1, not ", options.r());
  require(!options.alpha() || (std::isfinite(*options.alpha()) && *options.alpha() > 0),
          "LoraOptions::alpha must be a number above 0, not ", options.alpha().value_or(0));
  require(options.dropout() >= 0 && options.dropout() < 1, "LoraOptions::dropout must be in [0, 1), not ",
          options.dropout());
  const std::string& name = options.name();
  require(!name.empty() && name.find('.') == std::string::npos,
          "LoraOptions::name must be a name without dots, not \"", name, "\"");
}

// `options`: of each layer; their name is one.
std::vector<std::string> add_to(torch::nn::Module& model, const std::vector<LoraOptions>& options,
                                const std::vector<NamedLayer>& layers) {
  for (const LoraOptions& own : options) check_lora_options(own);
  detail::check_changeable("add_lora", model, layers);
  const std::string name = options.empty() ? "" : options.front().name();
  const std::vector<std::string> taken = adapters(model);
  require(std::find(taken.begin(), taken.end(), name) == taken.end(),
          "add_lora: the model has an adapter called ", name,
          " already; remove_adapter() it, or give this one another name");
  for (size_t i = 0; i < layers.size(); ++i) {
    require(options[i].name() == name, "add_lora: the layers of one call get an adapter of one name, not ",
            name, " and ", options[i].name());
    const std::string why = layers[i].layer->why_no_adapter(options[i]);
    require(why.empty(), "add_lora: ", layers[i].name, " ", why);
  }
  for (const auto& item : model.named_parameters()) item.value().requires_grad_(false);
  set_adapter(model, "");
  std::vector<std::string> names;
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].layer->add_adapter(options[i]);
    names.push_back(layers[i].name);
  }
  return names;
}

void require_adapter(const char* caller, const torch::nn::Module& model, const std::string& name) {
  const std::vector<std::string> names = adapters(model);
  require(std::find(names.begin(), names.end(), name) != names.end(), caller,
          ": the model has no adapter called ", name,
          names.empty() ? "; it has none at all" : "; it has " + names.front());
}

void set_active(const char* caller, torch::nn::Module& model, const std::vector<std::string>& names) {
  for (const std::string& name : names) require_adapter(caller, model, name);
  const std::vector<NamedLayer> layers = lora_layers(model);
  for (const auto& [name, layer] : layers) {
    require(!layer->is_merged(), caller, ": the adapter of ", name, " is merged; unmerge() first");
    const std::string why = layer->why_not_together(names);
    require(why.empty(), caller, ": ", name, " ", why);
  }
  for (const auto& item : layers) item.layer->set_active_adapters(names);
}

}  // namespace

bool matches_target(const std::string& name, const std::string& target) {
  if (target.empty()) return false;
  if (matches_pattern(name, target)) return true;
  for (size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1)) {
    if (matches_pattern(std::string_view(name).substr(dot + 1), target)) return true;
  }
  return false;
}

std::vector<std::string> add_lora(torch::nn::Module& model, const LoraOptions& options) {
  check_lora_options(options);
  const std::vector<NamedLayer> layers =
      detail::matching_layers<LoraLayer>("add_lora", model, options.targets());
  return add_to(model, std::vector<LoraOptions>(layers.size(), options), layers);
}

std::vector<std::string> add_lora_to(torch::nn::Module& model, const LoraOptions& options,
                                     const std::vector<std::string>& names) {
  check_lora_options(options);
  std::vector<std::pair<std::string, LoraOptions>> layers;
  for (const std::string& name : names) layers.emplace_back(name, options);
  return add_lora_to(model, layers);
}

std::vector<std::string> add_lora_to(torch::nn::Module& model,
                                     const std::vector<std::pair<std::string, LoraOptions>>& wanted) {
  const std::vector<NamedLayer> all = lora_layers(model);
  std::vector<NamedLayer> layers;
  std::vector<LoraOptions> options;
  for (const auto& item : wanted) {
    const std::string& name = item.first;
    const auto found =
        std::find_if(all.begin(), all.end(), [&](const NamedLayer& layer) { return layer.name == name; });
    require(found != all.end(), "add_lora: the model has no layer that takes adapters called ", name);
    layers.push_back(*found);
    options.push_back(item.second);
  }
  return add_to(model, options, layers);
}

std::vector<std::string> adapters(const torch::nn::Module& model) {
  std::vector<std::string> names;
  for (const auto& item : lora_layers(model)) {
    // From the last to the first, so that what the layer alone has comes before what it got later.
    auto next = names.end();
    const std::vector<LoraAdapter>& own = item.layer->adapters();
    for (auto adapter = own.rbegin(); adapter != own.rend(); ++adapter) {
      const std::string& name = (*adapter)->options.name();
      const auto found = std::find(names.begin(), names.end(), name);
      next = found != names.end() ? found : names.insert(next, name);
    }
  }
  return names;
}

void set_adapter(torch::nn::Module& model, const std::string& name) {
  set_active("set_adapter", model,
             name.empty() ? std::vector<std::string>() : std::vector<std::string>{name});
}

void set_adapters(torch::nn::Module& model, const std::vector<std::string>& names) {
  set_active("set_adapters", model, names);
}

void remove_adapter(torch::nn::Module& model, const std::string& name) {
  require_adapter("remove_adapter", model, name);
  const std::vector<NamedLayer> layers = lora_layers(model);
  for (const auto& [layer_name, layer] : layers) {
    const std::vector<LoraAdapter> active = layer->active_adapters();
    const bool is_one_of_several =
        active.size() > 1 && std::any_of(active.begin(), active.end(), [&](const LoraAdapter& adapter) {
          return adapter->options.name() == name;
        });
    require(!layer->is_merged() || !is_one_of_several, "remove_adapter: in ", layer_name, " the adapter ",
            name, " is merged together with others, whose sum cannot be taken apart; unmerge() first");
  }
  for (const auto& item : layers) item.layer->remove_adapter(name);
}

void merge(torch::nn::Module& model) {
  const std::vector<NamedLayer> layers = lora_layers(model);
  bool any = false;
  for (const auto& [name, layer] : layers) {
    if (layer->active_adapters().empty()) continue;
    any = true;
    const std::string why = layer->why_no_merge();
    require(why.empty(), "merge: the weight of ", name, " ", why);
    (void)layer->stored_weight().const_data_ptr();  // throws where Shards keeps it on other ranks
  }
  require(any, "merge: the model has no active adapter; add_lora() or set_adapter() first");
  std::vector<LoraLayer*> merged;  // by this call
  merged.reserve(layers.size());
  const auto unmerge_all = [&] {
    for (LoraLayer* done : merged) done->unmerge();
  };
  for (const auto& [name, layer] : layers) {
    if (layer->is_merged()) continue;
    try {
      layer->merge();
    } catch (const InvalidArgument& error) {
      unmerge_all();
      throw InvalidArgument(detail::concatenate("merge: the weight of ", name, ": ", error.what()));
    } catch (...) {  // of memory that ran out, for example
      unmerge_all();
      throw;
    }
    merged.push_back(layer);
  }
}

void unmerge(torch::nn::Module& model) {
  const std::vector<NamedLayer> layers = lora_layers(model);
  for (const auto& [name, layer] : layers) {
    require(
        layer->is_unmergeable(), "unmerge: the weight of ", name,
        " was written to since its adapter was merged, so that it cannot be told what it was before; load "
        "the model anew");
  }
  for (const auto& [name, layer] : layers) layer->unmerge();
}

torch::OrderedDict<std::string, at::Tensor> trainable(const torch::nn::Module& model) {
  torch::OrderedDict<std::string, at::Tensor> parameters("parameter");
  for (const auto& item : model.named_parameters()) {
    if (item.value().requires_grad()) parameters.insert(item.key(), item.value());
  }
  require(!parameters.is_empty(),
          "trainable: no parameter of the model requires a gradient; add_lora() first");
  return parameters;
}

}  // namespace pacer::modules
