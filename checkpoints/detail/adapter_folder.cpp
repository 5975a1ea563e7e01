#include <pacer/checkpoints/detail/adapter_folder.h>

#include <algorithm>
#include <set>
#include <utility>

#include <ATen/ops/isfinite.h>

#include <pacer/checkpoints/detail/linear_names.h>
#include <pacer/checkpoints/detail/tensor_file.h>
#include <pacer/checkpoints/detail/training_state.h>
#include <pacer/checkpoints/detail/weights_files.h>
#include <pacer/checkpoints/detail/weights_folder.h>
#include <pacer/core/error.h>
#include <pacer/files/file_system.h>
#include <pacer/files/json_scanner.h>
#include <pacer/files/safetensors.h>

namespace pacer::detail {
namespace {

bool ends_in(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

using Matrices = AdapterFolder::Matrices;

// What of which layer a tensor of the file is.
struct MatrixPlace {
  std::string layer;
  std::optional<std::vector<int64_t>> Matrices::*shape;
  bool is_embedding;
};

// Nothing for another name. `has_dora`: whether the adapter has magnitudes.
std::optional<MatrixPlace> matrix_place_of(std::string_view name, bool has_dora) {
  struct Suffix {
    std::string_view text;
    std::optional<std::vector<int64_t>> Matrices::*shape;
    bool is_embedding;
  };
  for (const Suffix& suffix :
       {Suffix{kAdapterA, &Matrices::a, false}, Suffix{kAdapterB, &Matrices::b, false},
        Suffix{kEmbeddingA, &Matrices::a, true}, Suffix{kEmbeddingB, &Matrices::b, true},
        Suffix{kMagnitude, &Matrices::magnitude, false}}) {
    if (name.size() <= suffix.text.size() || !ends_in(name, suffix.text)) continue;
    if (!has_dora && suffix.text == kMagnitude) continue;
    name.remove_suffix(suffix.text.size());
    return MatrixPlace{std::string(name), suffix.shape, suffix.is_embedding};
  }
  return std::nullopt;
}

// Whether the name is a part of this entry of modules_to_save: PEFT takes all modules whose names end so.
bool is_in_module(std::string_view name, const std::string& module) {
  for (size_t dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.', dot + 1)) {
    if (ends_in(name.substr(0, dot), module)) return true;
  }
  return false;
}

}  // namespace

std::string name_in_file(const std::string& layer, std::string_view suffix) {
  return concatenate(kAdapterPrefix, layer, suffix);
}

AdapterFolder read_adapter_folder(const std::string& folder) {
  require(!folder.empty(), "load_adapter needs the name of a folder; it is empty");
  AdapterFolder found;
  const std::string config_path = path_in(folder, kAdapterConfig);
  found.config = parse_adapter_config(read_config_file(config_path), config_path);
  found.path = path_in(folder, kAdapterModel);
  FileReader reader(posix_file_system(), without_links(found.path));
  const SafetensorsFile header = SafetensorsFile::read_header(reader, found.path);
  const std::vector<std::string>& modules = found.config.whole_modules;
  std::set<std::string> met;
  for (const std::string_view name : header.names()) {
    const bool has_prefix = name.substr(0, kAdapterPrefix.size()) == kAdapterPrefix;
    const std::string_view rest = has_prefix ? name.substr(kAdapterPrefix.size()) : "";
    const TensorView tensor = *header.find(name);
    const auto place = matrix_place_of(rest, found.config.dora);
    if (!place) {
      bool is_known = false;  // a name may be in several: "layer1.0.bn1" ends in "bn1", too
      for (const std::string& module : modules) {
        if (!is_in_module(rest, module)) continue;
        met.insert(module);
        is_known = true;
      }
      require(is_known, found.path, " has ", quote_for_message(name),
              ", which is no matrix of a low-rank adapter and in none of its modules_to_save; pacer loads "
              "names such as \"",
              kAdapterPrefix, "LAYER", kAdapterA, "\" and those of modules_to_save");
      require(tensor.dtype != Dtype::OTHER, found.path, ": ", quote_for_message(name), " is ",
              tensor.dtype_text, ", a dtype that LibTorch does not have");
      found.beside.emplace(rest, AdapterFolder::Tensor{tensor_dtype(tensor.dtype), tensor.shape});
      continue;
    }
    require(tensor.dtype != Dtype::OTHER && at::isFloatingType(tensor_dtype(tensor.dtype)), found.path, ": ",
            quote_for_message(name), " is ", tensor.dtype_text,
            "; the matrices of adapters are floating-point");
    auto& matrices = found.layers[place->layer];
    if (place->shape != &Matrices::magnitude) {
      require<FileError>((!matrices.a && !matrices.b) || matrices.is_embedding == place->is_embedding,
                         found.path, " has matrices of a layer and of an embedding for ",
                         quote_for_message(place->layer), "; it is damaged");
      matrices.is_embedding = place->is_embedding;
    }
    matrices.*(place->shape) = tensor.shape;
  }
  require<FileError>(!found.layers.empty(), found.path, " has no tensors");
  for (const std::string& module : modules) {
    require<FileError>(met.count(module) > 0, config_path, " has ", quote_for_message(module),
                       " among its modules_to_save, of which ", found.path, " has no tensor");
  }
  return found;
}

void require_both(const AdapterFolder& folder, const std::string& layer,
                  const AdapterFolder::Matrices& matrices) {
  require<FileError>(matrices.a && matrices.b, folder.path, " has only one of the two matrices of ",
                     quote_for_message(layer), "; it is damaged");
  require<FileError>(!folder.config.dora || matrices.magnitude, folder.path,
                     " has no lora_magnitude_vector of ", quote_for_message(layer),
                     ", which use_dora asks for; it is damaged");
}

// The matrices of the folder are what a layer of the model takes.
void check_matrices(const modules::LoraLayer& layer, const std::string& name, const AdapterFolder& folder) {
  const std::string layer_name = quote_for_message(name);
  const AdapterFolder::Matrices& matrices = folder.layers.at(name);
  const int64_t r = rank_of(folder.config, name);
  const std::string why =
      layer.why_no_adapter(modules::LoraOptions(r).dropout(folder.config.dropout).dora(folder.config.dora));
  require(why.empty(), folder.path, " has an adapter of ", layer_name, ", which in the model ", why);
  const modules::LoraMatrices wanted = layer.lora_matrices(r);
  const bool is_embedding = wanted.kind == modules::LoraKind::embedding;
  require(matrices.is_embedding == is_embedding, folder.path, " has ",
          matrices.is_embedding ? "matrices of an embedding" : "matrices of a layer that is no embedding",
          " for ", layer_name, ", which is ", is_embedding ? "one" : "none", " in the model");
  require(*matrices.a == wanted.a && *matrices.b == wanted.b, folder.path, " has matrices of ",
          at::IntArrayRef(*matrices.a), " and ", at::IntArrayRef(*matrices.b), " for ", layer_name,
          ", where r of ", r, " and the layer in the model make ", at::IntArrayRef(wanted.a), " and ",
          at::IntArrayRef(wanted.b));
  const std::vector<int64_t> rows = {wanted.b[0]};
  require(!folder.config.dora || *matrices.magnitude == rows, folder.path, " has a lora_magnitude_vector of ",
          at::IntArrayRef(matrices.magnitude.value_or(rows)), " for ", layer_name, ", which has ", rows[0],
          " rows in the model");
}

void check_layers(torch::nn::Module& model, const AdapterFolder& folder) {
  const std::map<std::string, modules::LoraLayer*> all = lora_names(model);
  std::map<const void*, std::string> first_name;
  for (const auto& [name, matrices] : folder.layers) {
    require_both(folder, name, matrices);
    const auto found = all.find(name);
    require(found != all.end(), folder.path, " has an adapter of ", quote_for_message(name),
            ", which is no pacer::modules::Linear of the model, nor a Conv1d, Conv2d, Conv3d or Embedding of "
            "pacer's",
            all.empty() ? "" : "; it has " + quote_for_message(all.begin()->first) + " among others");
    check_matrices(*found->second, name, folder);
    const auto [twin, is_first] = first_name.emplace(found->second, name);
    require(is_first, folder.path, " has adapters of \"", twin->second, "\" and \"", name,
            "\", which are one layer in the model");
  }
  if (folder.beside.empty()) return;
  const NamedTensors own = model_tensors(model);
  std::set<std::string> modules;  // by their names in the model
  for (const auto& [name, tensor] : folder.beside) {
    const auto found = own.find(name);
    require(found != own.end(), folder.path, " has ", quote_for_message(name),
            ", a part of its modules_to_save, which the model has not");
    const bool converts = at::isFloatingType(tensor.dtype) && at::isFloatingType(found->second.scalar_type());
    require(
        found->second.sizes() == tensor.shape && (converts || found->second.scalar_type() == tensor.dtype),
        folder.path, ": \"", name, "\" is ", tensor.dtype, " of shape ", at::IntArrayRef(tensor.shape),
        ", but ", found->second.scalar_type(), " of shape ", found->second.sizes(), " in the model");
    modules.insert(name.substr(0, name.rfind('.')));
  }
  for (const auto& item : own) {
    const size_t dot = item.first.rfind('.');
    if (dot == std::string::npos || modules.count(item.first.substr(0, dot)) == 0) continue;
    require(folder.beside.count(item.first) > 0, folder.path, " has other parts of \"",
            item.first.substr(0, dot), "\", but no \"", item.first, "\", which the model has");
  }
}

NamedTensors read_adapter_tensors(const AdapterFolder& folder) {
  FileReader reader(posix_file_system(), without_links(folder.path));
  NamedTensors values = read_tensors(reader, folder.path);
  reader.finish();
  size_t matrices = 0;
  for (auto& [name, value] : values) {
    const std::string_view rest = std::string_view(name).substr(std::min(name.size(), kAdapterPrefix.size()));
    const auto beside = folder.beside.find(std::string(rest));
    std::optional<std::vector<int64_t>> shape;
    if (beside != folder.beside.end()) {
      shape = beside->second.shape;
    } else if (const auto place = matrix_place_of(rest, folder.config.dora);
               place && folder.layers.count(place->layer) > 0) {
      const AdapterFolder::Matrices& of_layer = folder.layers.at(place->layer);
      shape = of_layer.*(place->shape);
      value = value.to(at::kFloat);
      ++matrices;
    }
    require<FileError>(shape && value.sizes() == *shape, folder.path, " changed while it was read");
    require(!at::isFloatingType(value.scalar_type()) || at::isfinite(value).all().item<bool>(), folder.path,
            ": ", quote_for_message(name), " has values that are not finite");
  }
  require<FileError>(matrices == (folder.config.dora ? 3 : 2) * folder.layers.size() &&
                         values.size() == matrices + folder.beside.size(),
                     folder.path, " changed while it was read");
  return values;
}

const at::Tensor& matrix_of(const NamedTensors& values, const std::string& layer, bool is_a) {
  const auto found = values.find(name_in_file(layer, is_a ? kAdapterA : kAdapterB));
  return found != values.end() ? found->second
                               : values.at(name_in_file(layer, is_a ? kEmbeddingA : kEmbeddingB));
}

const at::Tensor& magnitude_of(const NamedTensors& values, const std::string& layer) {
  return values.at(name_in_file(layer, kMagnitude));
}

const at::Tensor& beside_of(const NamedTensors& values, const std::string& name) {
  return values.at(name_in_file(name, ""));
}

}  // namespace pacer::detail
