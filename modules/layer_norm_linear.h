// A normalisation and the linear layer behind it, in one pass and one product: y = linear(norm(x)). In
// 8-bit floats (Fp8Scope, Precision::fp8) the normalised rows go to memory as those alone.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <pacer/kernels/choices.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/rms_norm.h>

namespace pacer::modules {

struct LayerNormLinearOptions {
  LayerNormLinearOptions(int64_t in_features, int64_t out_features)
      : in_features_(in_features), out_features_(out_features) {}
  TORCH_ARG(int64_t, in_features);
  TORCH_ARG(int64_t, out_features);
  TORCH_ARG(bool, bias) = true;  // of the linear layer
  TORCH_ARG(double, eps) = 1e-5;
  // How rows are normalised before the product.
  TORCH_ARG(Normalization, normalization) = Normalization::layer;
};

class LayerNormLinearImpl : public torch::nn::Cloneable<LayerNormLinearImpl> {
 public:
  LayerNormLinearImpl(int64_t in_features, int64_t out_features)
      : LayerNormLinearImpl(LayerNormLinearOptions(in_features, out_features)) {}
  explicit LayerNormLinearImpl(const LayerNormLinearOptions& options);

  void reset() override;

  // x [..., in_features] in Float, BFloat16 or Half -> [..., out_features] in the dtype of autocast; without
  // autocast in that of x, but bf16 for fp32 where it computes in 8 bits. No second derivative.
  at::Tensor forward(const at::Tensor& x);

  LayerNormLinearOptions options;
  // The child "norm" is one of these, by options.normalization(); the other is null.
  torch::nn::LayerNorm norm = nullptr;
  RmsNorm rms_norm = nullptr;
  Linear linear = nullptr;
};
TORCH_MODULE(LayerNormLinear);

}  // namespace pacer::modules
