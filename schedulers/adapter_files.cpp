#include <pacer/schedulers/adapter_files.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <torch/nn/module.h>

#include <pacer/core/error.h>
#include <pacer/core/file_system.h>
#include <pacer/core/json_scanner.h>
#include <pacer/core/safetensors.h>
#include <pacer/modules/lora.h>
#include <pacer/optimizers/named_tensors.h>
#include <pacer/schedulers/detail/adapter_config.h>
#include <pacer/schedulers/detail/linear_names.h>
#include <pacer/schedulers/detail/replaced_file.h>
#include <pacer/schedulers/detail/tensor_file.h>
#include <pacer/schedulers/detail/weights_files.h>

namespace pacer {
namespace {

constexpr const char* kAdapterModel = "adapter_model.safetensors";
constexpr const char* kAdapterConfig = "adapter_config.json";
constexpr std::string_view kPrefix = "base_model.model.";
constexpr std::string_view kSuffixA = ".lora_A.weight", kSuffixB = ".lora_B.weight";
constexpr int64_t kLargestConfig = 1 << 20;  // bytes

std::string path_in(const std::string& folder, const char* file) {
  return folder + (folder.back() == '/' ? "" : "/") + file;
}

std::string peft_name(const std::string& layer, std::string_view suffix) {
  return std::string(kPrefix) + layer + std::string(suffix);
}

// Layers by name that have the adapter, each under its first name.
std::map<std::string, nn::LoraAdapter> layers_with(torch::nn::Module& model, const std::string& name) {
  std::map<std::string, nn::LoraAdapter> layers;
  std::set<const void*> seen;
  for (const auto& [layer_name, layer] : detail::linear_names(model)) {
    const nn::LoraAdapter adapter = layer->adapter(name);
    if (!adapter.is_empty() && seen.insert(layer).second) layers.emplace(layer_name, adapter);
  }
  return layers;
}

detail::AdapterConfig config_of(const nn::LoraAdapterImpl& adapter) {
  return {adapter.r(), adapter.alpha(), adapter.options.dropout(), adapter.options.rslora()};
}

// What an adapter's folder says, checked as far as that goes without a model.
struct AdapterFolder {
  std::string path;  // of the file of tensors
  detail::AdapterConfig config;
  struct Matrices {
    std::optional<std::vector<int64_t>> a, b;  // their shapes
  };
  std::map<std::string, Matrices> layers;
};

// In the file: of the layer, which matrix; nothing for another name.
std::optional<std::pair<std::string, bool>> layer_of(std::string_view name) {
  if (name.substr(0, kPrefix.size()) != kPrefix) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  for (const bool is_a : {true, false}) {
    const std::string_view suffix = is_a ? kSuffixA : kSuffixB;
    if (name.size() > suffix.size() && name.substr(name.size() - suffix.size()) == suffix) {
      return std::pair(std::string(name.substr(0, name.size() - suffix.size())), is_a);
    }
  }
  return std::nullopt;
}

AdapterFolder read_folder(const std::string& folder) {
  require(!folder.empty(), "load_adapter needs the name of a folder; it is empty");
  AdapterFolder found;
  {
    const std::string path = path_in(folder, kAdapterConfig);
    FileReader reader(posix_file_system(), detail::without_links(path));
    require<FileError>(reader.size() <= kLargestConfig, path, " has ", reader.size(), " bytes; the limit is ",
                       kLargestConfig);
    const std::vector<char> text = reader.read();
    found.config = detail::parse_adapter_config({text.begin(), text.end()}, path);
  }
  found.path = path_in(folder, kAdapterModel);
  FileReader reader(posix_file_system(), detail::without_links(found.path));
  const SafetensorsFile header = SafetensorsFile::read_header(reader, found.path);
  for (const std::string_view name : header.names()) {
    const auto place = layer_of(name);
    require(place.has_value(), found.path, " has ", quote_for_message(name),
            ", which is no matrix of a low-rank adapter; pacer loads names such as \"", kPrefix, "LAYER",
            kSuffixA, "\" alone");
    const TensorView tensor = *header.find(name);
    require(tensor.dtype != Dtype::OTHER && at::isFloatingType(detail::tensor_dtype(tensor.dtype)),
            found.path, ": ", quote_for_message(name), " is ", tensor.dtype_text,
            "; the matrices of adapters are floating-point");
    auto& matrices = found.layers[place->first];
    (place->second ? matrices.a : matrices.b) = tensor.shape;
  }
  require<FileError>(!found.layers.empty(), found.path, " has no tensors");
  return found;
}

// Every layer of the folder is one of the model, of its size, under one name.
void check_layers(torch::nn::Module& model, const AdapterFolder& folder) {
  const std::map<std::string, nn::LinearImpl*> linears = detail::linear_names(model);
  std::map<const void*, std::string> first_name;
  for (const auto& [name, matrices] : folder.layers) {
    const std::string layer_name = quote_for_message(name);
    require<FileError>(matrices.a && matrices.b, folder.path, " has only one of the two matrices of ",
                       layer_name, "; it is damaged");
    const auto found = linears.find(name);
    require(found != linears.end(), folder.path, " has an adapter of ", layer_name,
            ", which is no pacer::nn::Linear of the model");
    const nn::LinearImpl& layer = *found->second;
    const int64_t out = layer.options.out_features(), in = layer.options.in_features();
    const std::vector<int64_t> a = {folder.config.r, in}, b = {out, folder.config.r};
    require(*matrices.a == a && *matrices.b == b, folder.path, " has matrices of ",
            at::IntArrayRef(*matrices.a), " and ", at::IntArrayRef(*matrices.b), " for ", layer_name,
            ", where r of ", folder.config.r, " and a layer of ", out, " x ", in, " make ",
            at::IntArrayRef(a), " and ", at::IntArrayRef(b));
    const auto [twin, is_first] = first_name.emplace(found->second, name);
    require(is_first, folder.path, " has adapters of \"", twin->second, "\" and \"", name,
            "\", which are one layer in the model");
  }
}

// The adapters that are in the model already are those of the folder, and free to be written to.
void check_present(torch::nn::Module& model, const std::map<std::string, nn::LoraAdapter>& present,
                   const AdapterFolder& folder, const std::string& name) {
  const auto remedy = [&] {
    return detail::concatenate("; remove_adapter(model, \"", name, "\") first, or load it by another name");
  };
  const auto linears = detail::linear_names(model);
  for (const auto& [layer, adapter] : present) {
    require(folder.layers.count(layer) > 0, folder.path, " has no adapter of \"", layer,
            "\", where the model has one called \"", name, "\"", remedy());
    const detail::AdapterConfig own = config_of(*adapter);
    require(
        own.r == folder.config.r && own.alpha == folder.config.alpha && own.rslora == folder.config.rslora,
        folder.path, " is of r ", folder.config.r, " and alpha ", folder.config.alpha,
        folder.config.rslora ? " (rsLoRA)" : "", ", but the adapter \"", name, "\" of \"", layer,
        "\" in the model of r ", own.r, " and alpha ", own.alpha, own.rslora ? " (rsLoRA)" : "", remedy());
    require(!linears.at(layer)->is_merged(), "cannot load ", folder.path, ": the adapter of \"", layer,
            "\" is merged into its weight; unmerge() the model first");
  }
  for (const auto& item : folder.layers) {
    require(present.count(item.first) > 0, folder.path, " has an adapter of \"", item.first,
            "\", where the model's adapter called \"", name, "\" has none", remedy());
  }
}

// fp32, by the names in the file.
NamedTensors read_matrices(const AdapterFolder& folder) {
  FileReader reader(posix_file_system(), detail::without_links(folder.path));
  NamedTensors values = detail::read_tensors(reader, folder.path);
  reader.finish();
  for (auto& [name, value] : values) {
    value = value.to(at::kFloat);
    require(at::isfinite(value).all().item<bool>(), folder.path, ": ", quote_for_message(name),
            " has values that are not finite");
  }
  return values;
}

// Of the file and of a layer's name; the file may have changed since its header was read.
const at::Tensor& matrix_of(const NamedTensors& values, const AdapterFolder& folder, const std::string& layer,
                            bool is_a) {
  const auto found = values.find(peft_name(layer, is_a ? kSuffixA : kSuffixB));
  const AdapterFolder::Matrices& matrices = folder.layers.at(layer);
  require<FileError>(found != values.end() && found->second.sizes() == *(is_a ? matrices.a : matrices.b),
                     folder.path, " changed while it was read");
  return found->second;
}

}  // namespace

void save_adapter(torch::nn::Module& model, const std::string& folder, const std::string& name) {
  require(!folder.empty(), "save_adapter needs the name of a folder; it is empty");
  const std::map<std::string, nn::LoraAdapter> layers = layers_with(model, name);
  require(!layers.empty(), "save_adapter: the model has no adapter called \"", name,
          "\"; add_lora or load_adapter adds one");
  const detail::AdapterConfig config = config_of(*layers.begin()->second);
  NamedTensors tensors;
  std::vector<std::string> names, modules;
  for (const auto& [layer, adapter] : layers) {
    const detail::AdapterConfig own = config_of(*adapter);
    require(!layer.empty(),
            "save_adapter: the model is itself the layer with the adapter, which then has no "
            "name; make it a part of a model");
    require(own.r == config.r && own.alpha == config.alpha && own.dropout == config.dropout &&
                own.rslora == config.rslora,
            "save_adapter: the adapters called \"", name, "\" of \"", layers.begin()->first, "\" and \"",
            layer, "\" have different options");
    tensors[peft_name(layer, kSuffixA)] = adapter->A;
    tensors[peft_name(layer, kSuffixB)] = adapter->B;
    names.push_back(layer);
  }
  for (const auto& item : model.named_modules("", /*include_self=*/false)) modules.push_back(item.key());
  const std::string text = detail::adapter_config_text(config, names, modules);

  FileSystem& files = posix_file_system();
  make_folders(files, folder);
  const std::string model_path = path_in(folder, kAdapterModel),
                    config_path = path_in(folder, kAdapterConfig);
  detail::write_next(model_path, [&](ByteSink& out) {
    detail::write_tensors(out, tensors, {{"format", "pt"}});
  });
  try {
    detail::write_next(config_path, [&](ByteSink& out) { out.write(text.data(), text.size()); });
  } catch (...) {
    files.remove_file(model_path + ".new");
    throw;
  }
  // Matrices never lie beside options of other ones: while they change there are none.
  const std::optional<std::string> before = detail::content_if_there(config_path);
  if (before && *before != text) {
    remove_file(files, config_path);
    sync_folder(files, folder);
  }
  detail::put_next_in_place(model_path);
  sync_folder(files, folder);
  detail::put_next_in_place(config_path);
  sync_folder(files, folder);
}

std::vector<std::string> load_adapter(torch::nn::Module& model, const std::string& folder,
                                      const LoadAdapterOptions& options) {
  const at::NoGradGuard no_grad;
  const AdapterFolder found = read_folder(folder);
  check_layers(model, found);
  std::map<std::string, nn::LoraAdapter> layers = layers_with(model, options.name());
  if (!layers.empty()) check_present(model, layers, found, options.name());
  const NamedTensors values = read_matrices(found);
  std::vector<std::string> names;
  for (const auto& item : found.layers) {
    names.push_back(item.first);
    matrix_of(values, found, item.first, true);
    matrix_of(values, found, item.first, false);
  }
  if (layers.empty()) {
    nn::add_lora_to(model,
                    nn::LoraOptions(found.config.r)
                        .alpha(found.config.alpha)
                        .dropout(found.config.dropout)
                        .rslora(found.config.rslora)
                        .name(options.name()),
                    names);
    layers = layers_with(model, options.name());
  }
  for (const auto& [layer, adapter] : layers) {
    adapter->A.copy_(matrix_of(values, found, layer, true));
    adapter->B.copy_(matrix_of(values, found, layer, false));
    if (options.trainable()) continue;
    adapter->A.requires_grad_(false);
    adapter->B.requires_grad_(false);
  }
  return names;
}

}  // namespace pacer
