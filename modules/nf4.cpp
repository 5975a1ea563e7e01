#include <pacer/modules/nf4.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/layer_targets.h>
#include <pacer/modules/detail/matrix.h>

namespace pacer::modules {

std::vector<std::string> quantize(torch::nn::Module& model, const Nf4Options& options) {
  const at::NoGradGuard no_grad;
  const auto layers = detail::matching_layers<LinearImpl>("quantize", model, options.targets());
  detail::check_changeable("quantize", model, layers);
  for (const auto& [name, layer] : layers) {
    if (!layer->nf4().is_empty()) continue;
    const at::Tensor& weight = layer->weight;
    require(detail::is_castable(weight), "quantize: the weight of ", name, " is ", weight.scalar_type(),
            ", but must be Float, BFloat16 or Half");
    require(at::isfinite(weight).all().item<bool>(), "quantize: the weight of ", name,
            " has elements that are not finite");
  }
  std::vector<std::string> names;
  for (const auto& [name, layer] : layers) {
    if (layer->nf4().is_empty()) layer->set_nf4(Nf4Weight(layer->weight, options.double_quantization()));
    names.push_back(name);
  }
  return names;
}

std::vector<std::string> dequantize(torch::nn::Module& model) {
  std::vector<std::string> names;
  for (const auto& [name, layer] : detail::layers_of<LinearImpl>(model)) {
    if (layer->nf4().is_empty()) continue;
    layer->dequantize();
    names.push_back(name);
  }
  return names;
}

}  // namespace pacer::modules
