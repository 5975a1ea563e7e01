#include <pacer/checkpoints/detail/adapter_modules.h>

#include <algorithm>
#include <set>
#include <unordered_set>

#include <c10/util/Exception.h>

#include <pacer/checkpoints/detail/linear_names.h>
#include <pacer/checkpoints/detail/training_state.h>
#include <pacer/core/error.h>
#include <pacer/modules/detail/buffer_names.h>

namespace pacer::detail {

AdapterModules modules_beside(torch::nn::Module& model, const std::string& name) {
  std::unordered_set<const void*> of_adapters;
  std::set<std::string> adapted;  // layers
  for (const auto& [layer_name, layer] : lora_names(model)) {
    if (!layer->adapters().empty()) adapted.insert(layer_name);
    for (const modules::LoraAdapter& adapter : layer->adapters()) {
      for (const at::Tensor& parameter : adapter->parameters()) {
        of_adapters.insert(parameter.unsafeGetTensorImpl());
      }
    }
  }
  const NamedTensors all = model_tensors(model);
  std::set<std::string> modules;
  std::string without_place;  // names of statistics
  for (const auto& [tensor_name, tensor] : all) {
    if (of_adapters.count(tensor.unsafeGetTensorImpl()) > 0) continue;
    if (!tensor.requires_grad() && !is_running_statistic(tensor_name)) continue;
    const size_t dot = tensor_name.rfind('.');
    const std::string module = dot == std::string::npos ? "" : tensor_name.substr(0, dot);
    const auto below = adapted.lower_bound(module + '.');
    const bool has_adapters =
        adapted.count(module) > 0 ||
        (below != adapted.end() && below->compare(0, module.size() + 1, module + '.') == 0);
    const bool has_place = !module.empty() && !has_adapters;
    require(has_place || !tensor.requires_grad(), "save_adapter: \"", tensor_name,
            "\" is trained beside the adapter \"", name, "\", and the files of PEFT have no place for ",
            module.empty() ? "a parameter of the model itself" : "parameters of layers with adapters",
            "; freeze it, or keep the model by save_weights or Checkpoints as well");
    if (has_place) {
      modules.insert(module);
    } else {
      without_place += (without_place.empty() ? "\"" : ", \"") + tensor_name + "\"";
    }
  }
  if (!without_place.empty()) {
    TORCH_WARN(
        "save_adapter: PEFT's files have no place for statistics of the model itself or of modules with "
        "adapters, so that what training made of these is in no file: ",
        without_place, "; keep the model by save_weights or Checkpoints as well");
  }
  AdapterModules beside;
  for (const auto& [tensor_name, tensor] : all) {
    for (size_t dot = tensor_name.find('.'); dot != std::string::npos; dot = tensor_name.find('.', dot + 1)) {
      const std::string module = tensor_name.substr(0, dot);
      if (modules.count(module) == 0) continue;
      beside.tensors.emplace(tensor_name, tensor);
      if (beside.names.empty() || beside.names.back() != module) beside.names.push_back(module);
      break;
    }
  }
  std::sort(beside.names.begin(), beside.names.end());
  beside.names.erase(std::unique(beside.names.begin(), beside.names.end()), beside.names.end());
  return beside;
}

}  // namespace pacer::detail
