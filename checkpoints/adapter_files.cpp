#include <pacer/checkpoints/adapter_files.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <torch/nn/module.h>

#include <pacer/checkpoints/detail/adapter_folder.h>
#include <pacer/checkpoints/detail/adapter_modules.h>
#include <pacer/checkpoints/detail/causal_lm_adapter.h>
#include <pacer/checkpoints/detail/linear_names.h>
#include <pacer/checkpoints/detail/training_state.h>
#include <pacer/checkpoints/detail/weights_folder.h>
#include <pacer/core/error.h>
#include <pacer/modules/detail/buffer_names.h>
#include <pacer/modules/lora.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer {
namespace {

using detail::AdapterFolder;

// The name of the matrix A or B of the layer's adapter in a file.
std::string matrix_in_file(const std::string& layer, const modules::LoraAdapter& adapter, bool is_a) {
  const bool is_embedding = adapter->matrices.kind == modules::LoraKind::embedding;
  return detail::name_in_file(layer, is_embedding ? (is_a ? detail::kEmbeddingA : detail::kEmbeddingB)
                                                  : (is_a ? detail::kAdapterA : detail::kAdapterB));
}

// Layers by name that have the adapter, each under its first name.
std::map<std::string, modules::LoraAdapter> layers_with(torch::nn::Module& model, const std::string& name) {
  std::map<std::string, modules::LoraAdapter> layers;
  std::set<const void*> seen;
  for (const auto& [layer_name, layer] : detail::lora_names(model)) {
    const modules::LoraAdapter adapter = layer->adapter(name);
    if (!adapter.is_empty() && seen.insert(layer).second) layers.emplace(layer_name, adapter);
  }
  return layers;
}

// The options of the adapters of these layers; patterns where they differ, longer names first, because the
// first that fits counts. InvalidArgument where they differ in what PEFT has one of.
detail::AdapterConfig config_of(const std::map<std::string, detail::LayerInFile>& layers,
                                const std::string& name) {
  detail::AdapterConfig config;
  const std::string& first_layer = layers.begin()->first;
  const modules::LoraAdapter& first = layers.begin()->second.adapter;
  config.r = first->r();
  config.alpha = first->alpha();
  config.dropout = first->options.dropout();
  config.rslora = first->options.rslora();
  config.dora = first->options.dora();
  bool ranks_differ = false, alphas_differ = false;
  for (const auto& [layer, part] : layers) {
    const modules::LoraAdapter& adapter = part.adapter;
    require(!layer.empty(),
            "save_adapter: the model is itself the layer with the adapter, which then has no "
            "name; make it a part of a model");
    require(adapter->options.dropout() == config.dropout && adapter->options.rslora() == config.rslora &&
                adapter->options.dora() == config.dora,
            "save_adapter: the adapters called \"", name, "\" of \"", first_layer, "\" and \"", layer,
            "\" differ in dropout, rslora or dora, of which PEFT's files have one for all layers");
    ranks_differ |= adapter->r() != config.r;
    alphas_differ |= adapter->alpha() != config.alpha;
    config.rank_pattern.emplace_back(layer, adapter->r());
    config.alpha_pattern.emplace_back(layer, adapter->alpha());
  }
  const auto longer = [](const auto& a, const auto& b) { return a.first.size() > b.first.size(); };
  std::stable_sort(config.rank_pattern.begin(), config.rank_pattern.end(), longer);
  std::stable_sort(config.alpha_pattern.begin(), config.alpha_pattern.end(), longer);
  if (!ranks_differ) config.rank_pattern.clear();
  if (!alphas_differ) config.alpha_pattern.clear();
  return config;
}

// The adapters that are in the model already are those of the folder, and free to be written to.
void check_present(torch::nn::Module& model, const std::map<std::string, modules::LoraAdapter>& present,
                   const AdapterFolder& folder, const std::string& name) {
  const auto remedy = [&] {
    return detail::concatenate("; remove_adapter(model, \"", name, "\") first, or load it by another name");
  };
  const auto all = detail::lora_names(model);
  for (const auto& [layer, adapter] : present) {
    require(folder.layers.count(layer) > 0, folder.path, " has no adapter of \"", layer,
            "\", where the model has one called \"", name, "\"", remedy());
    const int64_t r = rank_of(folder.config, layer);
    const double alpha = alpha_of(folder.config, layer);
    const bool rslora = adapter->options.rslora();
    require(adapter->r() == r && adapter->alpha() == alpha && rslora == folder.config.rslora, folder.path,
            " is of r ", r, " and alpha ", alpha, folder.config.rslora ? " (rsLoRA)" : "",
            ", but the adapter \"", name, "\" of \"", layer, "\" in the model of r ", adapter->r(),
            " and alpha ", adapter->alpha(), rslora ? " (rsLoRA)" : "", remedy());
    require(adapter->options.dora() == folder.config.dora, folder.path, " is ",
            folder.config.dora ? "of DoRA" : "not of DoRA", ", but the adapter \"", name, "\" of \"", layer,
            "\" in the model is ", folder.config.dora ? "not" : "", remedy());
    require(!all.at(layer)->is_merged(), "cannot load ", folder.path, ": the adapter of \"", layer,
            "\" is merged into its weight; unmerge() the model first");
  }
  for (const auto& item : folder.layers) {
    require(present.count(item.first) > 0, folder.path, " has an adapter of \"", item.first,
            "\", where the model's adapter called \"", name, "\" has none", remedy());
  }
}

std::string module_of(const std::string& tensor) { return tensor.substr(0, tensor.rfind('.')); }

// A value of the file is finite, and must be so in the model's dtype.
void check_fits(const AdapterFolder& folder, const std::string& name, const at::Tensor& value,
                at::ScalarType dtype) {
  if (!at::isFloatingType(dtype) || value.scalar_type() == dtype) return;
  require(at::isfinite(value.to(dtype)).all().item<bool>(), folder.path, ": ", name,
          " has values that are beyond the largest number of ", dtype, ", which it is in the model");
}

// A model has one of each module, whatever adapter is active, so that what another one was trained with
// stays.
void check_beside(const torch::nn::Module& model, const NamedTensors& own, const NamedTensors& values,
                  const AdapterFolder& folder, const std::string& adapter) {
  const std::vector<std::string> adapters = modules::adapters(model);
  const auto other = std::find_if(adapters.begin(), adapters.end(),
                                  [&](const std::string& name) { return name != adapter; });
  for (const auto& item : folder.beside) {
    const at::Tensor& tensor = own.at(item.first);
    const at::Tensor& value = detail::beside_of(values, item.first);
    check_fits(folder, item.first, value, tensor.scalar_type());
    require(other == adapters.end() || value.to(tensor.options()).equal(tensor), folder.path,
            " has another \"", item.first, "\" than the model, which has one for all of its adapters, \"",
            other == adapters.end() ? "" : *other, "\" among them; remove_adapter() the others first");
  }
}

}  // namespace

void save_adapter(torch::nn::Module& model, const std::string& folder, const std::string& name) {
  require(!folder.empty(), "save_adapter needs the name of a folder; it is empty");
  const std::map<std::string, modules::LoraAdapter> layers = layers_with(model, name);
  require(!layers.empty(), "save_adapter: the model has no adapter called \"", name,
          "\"; add_lora or load_adapter adds one");
  const std::map<std::string, detail::LayerInFile> in_file = detail::layers_in_file(model, layers);
  detail::AdapterConfig config = config_of(in_file, name);
  detail::AdapterModules beside = detail::modules_beside(model, name);
  detail::name_as_in_file(model, beside);
  config.whole_modules = beside.names;
  NamedTensors tensors;
  std::vector<std::string> names, modules;
  for (const auto& [layer, part] : in_file) {
    tensors[matrix_in_file(layer, part.adapter, true)] = part.adapter->A;
    tensors[matrix_in_file(layer, part.adapter, false)] = part.adapter->B.narrow(0, part.first, part.count);
    if (config.dora) {
      tensors[detail::name_in_file(layer, detail::kMagnitude)] =
          part.adapter->magnitude.narrow(0, part.first, part.count);
    }
    names.push_back(layer);
  }
  for (const auto& [tensor_name, tensor] : beside.tensors)
    tensors[detail::name_in_file(tensor_name, "")] = tensor;
  for (const auto& item : model.named_modules("", /*include_self=*/false)) modules.push_back(item.key());
  const std::string text = detail::adapter_config_text(config, names, modules);

  detail::replace_weights_and_config(folder, detail::kAdapterModel, tensors, detail::kAdapterConfig, text);
}

std::vector<std::string> load_adapter(torch::nn::Module& model, const std::string& folder,
                                      const LoadAdapterOptions& options) {
  const at::NoGradGuard no_grad;
  AdapterFolder found = detail::read_adapter_folder(folder);
  NamedTensors values;
  const bool is_joined = detail::join_layers(model, found, values);
  detail::check_layers(model, found);
  std::map<std::string, modules::LoraAdapter> layers = layers_with(model, options.name());
  const bool is_new = layers.empty();
  if (!is_new) check_present(model, layers, found, options.name());
  if (!is_joined) values = detail::read_adapter_tensors(found);
  for (const auto& [layer, adapter] : layers) {
    for (const bool is_a : {true, false}) {
      check_fits(found, matrix_in_file(layer, adapter, is_a), detail::matrix_of(values, layer, is_a),
                 (is_a ? adapter->A : adapter->B).scalar_type());
    }
    if (!found.config.dora) continue;
    check_fits(found, detail::name_in_file(layer, detail::kMagnitude), detail::magnitude_of(values, layer),
               adapter->magnitude.scalar_type());
  }
  const NamedTensors own = found.beside.empty() ? NamedTensors() : detail::model_tensors(model);
  check_beside(model, own, values, found, options.name());
  std::vector<std::string> names;
  std::vector<std::pair<std::string, modules::LoraOptions>> wanted;
  for (const auto& item : found.layers) {
    names.push_back(item.first);
    wanted.emplace_back(item.first, modules::LoraOptions(rank_of(found.config, item.first))
                                        .alpha(alpha_of(found.config, item.first))
                                        .dropout(found.config.dropout)
                                        .rslora(found.config.rslora)
                                        .dora(found.config.dora)
                                        .name(options.name()));
  }
  if (is_new) {
    modules::add_lora_to(model, wanted);
    layers = layers_with(model, options.name());
  }
  for (const auto& [layer, adapter] : layers) {
    adapter->A.copy_(detail::matrix_of(values, layer, true));
    adapter->B.copy_(detail::matrix_of(values, layer, false));
    if (found.config.dora) adapter->magnitude.copy_(detail::magnitude_of(values, layer));
    if (options.trainable()) continue;
    for (const at::Tensor& parameter : adapter->parameters()) parameter.requires_grad_(false);
  }
  std::set<std::string> with_statistics;  // modules
  for (const auto& item : found.beside) {
    if (detail::is_running_statistic(item.first)) with_statistics.insert(module_of(item.first));
  }
  const auto parameters = model.named_parameters();
  for (const auto& item : found.beside) {
    const at::Tensor& tensor = own.at(item.first);
    tensor.copy_(detail::beside_of(values, item.first));
    const bool trains = is_new && options.trainable() && parameters.contains(item.first) &&
                        with_statistics.count(module_of(item.first)) == 0;
    if (trains) tensor.requires_grad_(true);
  }
  return names;
}

}  // namespace pacer
