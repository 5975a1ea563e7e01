#include <pacer/checkpoints/causal_lm_files.h>

#include <filesystem>
#include <iterator>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include <pacer/checkpoints/detail/causal_lm_config.h>
#include <pacer/checkpoints/detail/causal_lm_names.h>
#include <pacer/checkpoints/detail/checkpoint_files.h>
#include <pacer/checkpoints/detail/linear_names.h>
#include <pacer/checkpoints/detail/merged_weights.h>
#include <pacer/checkpoints/detail/named_weights.h>
#include <pacer/checkpoints/detail/weights_folder.h>
#include <pacer/core/error.h>
#include <pacer/modules/detail/head_sizes.h>

namespace pacer {
namespace {

constexpr const char* kConfig = "config.json";
constexpr std::string_view kInvFreq = ".self_attn.rotary_emb.inv_freq";

using detail::CausalLmConfig;

// Without a model_type where no class of transformers is such a model.
CausalLmConfig config_of(const modules::CausalLmOptions& options) {
  const bool has_bias = options.qkv_bias().value_or(false), has_norm = options.qk_norm();
  CausalLmConfig config;
  if (!has_bias || !has_norm) config.model_type = has_norm ? "qwen3" : has_bias ? "qwen2" : "llama";
  config.vocabulary = options.vocabulary();
  config.hidden = options.hidden();
  config.ffn = options.ffn();
  config.layers = options.layers();
  config.heads = options.heads();
  config.kv_heads = detail::kv_heads_of(options);
  config.head_dim = detail::head_dim_of(options);
  config.eps = options.eps();
  config.theta = options.theta();
  if (const auto& scaling = options.scaling()) {
    config.scaling = {scaling->factor(), scaling->low_frequency_factor(), scaling->high_frequency_factor(),
                      scaling->original_length()};
  }
  config.init_std = options.init_std();
  config.tied = options.tied();
  return config;
}

CausalLmConfig read_config(const char* caller, const std::string& folder) {
  require(!folder.empty(), caller, " needs the name of a folder; it is empty");
  const std::string path = detail::path_in(folder, kConfig);
  return detail::parse_causal_lm_config(detail::read_config_file(path), path);
}

// InvalidArgument that begins with `cannot` where a weight is in 4 bits, which has no rows to give names to.
void require_rows(modules::CausalLmImpl& model, const std::string& cannot, const char* remedy) {
  for (const auto& [name, layer] : detail::linear_names(model)) {
    require(layer->nf4().is_empty(), cannot, "the weight of \"", name, "\" is in 4 bits", remedy);
  }
}

// The model's parameters by the names that transformers gives them, in the model's memory.
NamedTensors by_their_names(modules::CausalLmImpl& model) {
  NamedTensors own, tensors;
  for (const auto& item : model.named_parameters()) own.emplace(item.key(), item.value().detach());
  for (const detail::CausalLmName& name : detail::causal_lm_names(model.options)) {
    for (const char* kind : {".weight", ".bias"}) {
      const auto found = own.find(name.own + kind);
      if (found == own.end()) continue;
      const at::Tensor& whole = found->second;
      tensors.emplace(name.theirs + kind, name.count == 0 ? whole : whole.narrow(0, name.first, name.count));
    }
  }
  // One tensor where it is tied, whichever of the names a file has.
  tensors.emplace("lm_head.weight", tensors.at("model.embed_tokens.weight"));
  return tensors;
}

bool is_inv_freq(const std::string& name) {
  return name.size() > kInvFreq.size() &&
         std::string_view(name).substr(name.size() - kInvFreq.size()) == kInvFreq;
}

// As config.json names it.
std::string dtype_of(const NamedTensors& tensors) {
  const at::ScalarType dtype = tensors.begin()->second.scalar_type();
  for (const auto& [name, tensor] : tensors) {
    require(tensor.scalar_type() == dtype, "save_causal_lm: ", tensors.begin()->first, " is ", dtype, " and ",
            name, " ", tensor.scalar_type(),
            "; a folder of transformers has one dtype, so convert the model or a clone of it");
  }
  if (dtype == at::kFloat) return "float32";
  if (dtype == at::kBFloat16) return "bfloat16";
  require(dtype == at::kHalf, "save_causal_lm writes Float, BFloat16 and Half, not ", dtype,
          "; convert the model or a clone of it");
  return "float16";
}

}  // namespace

modules::CausalLmOptions causal_lm_options(const std::string& folder) {
  const CausalLmConfig config = read_config("causal_lm_options", folder);
  modules::CausalLmOptions options(config.vocabulary, config.hidden, config.layers, config.heads);
  options.ffn(config.ffn).kv_heads(config.kv_heads).head_dim(config.head_dim);
  options.eps(config.eps).theta(config.theta).tied(config.tied).init_std(config.init_std);
  if (const auto& scaling = config.scaling) {
    options.scaling(modules::RotaryScaling()
                        .factor(scaling->factor)
                        .low_frequency_factor(scaling->low_freq_factor)
                        .high_frequency_factor(scaling->high_freq_factor)
                        .original_length(scaling->original_length));
  }
  options.qk_norm(config.model_type == "qwen3");
  if (config.model_type == "qwen2") options.qkv_bias(true);
  return options;
}

LoadedWeights load_causal_lm(modules::CausalLmImpl& model, const std::string& folder) {
  const CausalLmConfig there = read_config("load_causal_lm", folder);
  const std::string other = detail::difference(there, config_of(model.options));
  require(other.empty(), "cannot load ", folder, " into this CausalLm: ", kConfig, " has ", other,
          "; make the model with causal_lm_options(folder)");
  const std::string cannot = "cannot load " + folder + ": ";
  require_rows(model, cannot,
               " in the model; load the weights first, pacer::modules::quantize the model after");
  detail::require_unmerged(model, cannot);
  const detail::WeightsFiles files = detail::find_hugging_face_weights(folder);
  const std::vector<SafetensorsFile> headers = detail::read_headers(files);
  std::map<std::string, TensorView> in_files = detail::tensors_of(headers);
  std::vector<std::string> passed_over;
  for (auto item = in_files.begin(); item != in_files.end();) {
    if (is_inv_freq(item->first)) passed_over.push_back(item->first);
    item = is_inv_freq(item->first) ? in_files.erase(item) : std::next(item);
  }
  detail::QuantizedWeights quantized(model, in_files);
  LoadedWeights loaded = detail::load_named(by_their_names(model), files, in_files, quantized, {});
  loaded.unexpected = passed_over;
  return loaded;
}

void save_causal_lm(modules::CausalLmImpl& model, const std::string& folder,
                    const SaveCausalLmOptions& options) {
  require(!folder.empty(), "save_causal_lm needs the name of a folder; it is empty");
  require(options.max_positions() > 0, "SaveCausalLmOptions::max_positions must be above 0, not ",
          options.max_positions());
  const CausalLmConfig config = config_of(model.options);
  require(
      !config.model_type.empty(),
      "save_causal_lm: no class of transformers has both qkv_bias and qk_norm; save_weights writes such a "
      "model for pacer");
  require(config.model_type != "llama" || config.hidden % config.heads == 0,
          "save_causal_lm: transformers refuses a Llama whose hidden, ", config.hidden,
          ", is no multiple of its heads, ", config.heads,
          ", whatever head_dim is; save_weights writes such a model for pacer");
  const std::string index = detail::path_in(folder, detail::kModelIndex);
  require(!std::filesystem::exists(index), index,
          " names the files of other weights, which some readers take in place of those of save_causal_lm; "
          "remove "
          "it and its files, or take another folder");
  require_rows(model, "save_causal_lm: ", "; dequantize() the model or a clone of it");
  for (const auto& [name, layer] : detail::linear_names(model)) {
    require(layer->is_merged() || layer->active_adapters().empty(), "save_causal_lm: the adapter of \"", name,
            "\" has no place in a folder of transformers; merge() the model, or set_adapter(model, \"\") to "
            "save it without");
  }
  NamedTensors tensors = by_their_names(model);
  if (config.tied) tensors.erase("lm_head.weight");
  const std::string text =
      detail::causal_lm_config_text(config, {options.max_positions(), dtype_of(tensors)});
  detail::replace_weights_and_config(folder, detail::kModelFile, tensors, kConfig, text);
}

}  // namespace pacer
