// The norm of a fused layer, which is one of two kinds under one name.
#pragma once

#include <torch/nn/modules/normalization.h>

#include <pacer/modules/rms_norm.h>

namespace pacer::detail {

// Makes the child "norm" of a layer with members norm, rms_norm and options, of which one stays null.
template <class Layer>
void register_norm(Layer& layer, int64_t features) {
  layer.norm = nullptr;
  layer.rms_norm = nullptr;
  if (layer.options.normalization() == Normalization::rms) {
    layer.rms_norm = layer.register_module(
        "norm", modules::RmsNorm(modules::RmsNormOptions(features).eps(layer.options.eps())));
  } else {
    layer.norm = layer.register_module(
        "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({features}).eps(layer.options.eps())));
  }
}

}  // namespace pacer::detail
