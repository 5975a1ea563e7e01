// The feed-forward network of a transformer behind its normalisation: two products and a few passes
// between them, each fused with its neighbours,
//
//   y = fc2(activation(fc1(norm(x))))    or, with residual(true),    y = x + dropout(the same)
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <pacer/kernels/choices.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/rms_norm.h>

namespace pacer::modules {

struct LayerNormMlpOptions {
  LayerNormMlpOptions(int64_t features, int64_t ffn) : features_(features), ffn_(ffn) {}
  TORCH_ARG(int64_t, features);
  TORCH_ARG(int64_t, ffn);  // features between the products
  // gelu: its tanh approximation. swiglu: fc1 has 2 * ffn outputs, the gate's first.
  TORCH_ARG(Activation, activation) = Activation::gelu;
  TORCH_ARG(bool, bias) = true;  // of both linear layers
  TORCH_ARG(double, eps) = 1e-5;
  TORCH_ARG(bool, residual) = false;
  TORCH_ARG(double, dropout) = 0;  // behind fc2, in train()
  // How rows are normalised before fc1.
  TORCH_ARG(Normalization, normalization) = Normalization::layer;
};

class LayerNormMlpImpl : public torch::nn::Cloneable<LayerNormMlpImpl> {
 public:
  LayerNormMlpImpl(int64_t features, int64_t ffn) : LayerNormMlpImpl(LayerNormMlpOptions(features, ffn)) {}
  explicit LayerNormMlpImpl(const LayerNormMlpOptions& options);

  void reset() override;

  // x [..., features] in Float, BFloat16 or Half -> the same shape. With residual(true) in the dtype of x,
  // or of autocast where x has other 16 bits; else in the dtype of autocast, without autocast in that of x,
  // but bf16 for fp32 where it computes in 8 bits. No second derivative.
  at::Tensor forward(const at::Tensor& x);

  LayerNormMlpOptions options;
  // The child "norm" is one of these, by options.normalization(); the other is null.
  torch::nn::LayerNorm norm = nullptr;
  RmsNorm rms_norm = nullptr;
  Linear fc1 = nullptr, fc2 = nullptr;
};
TORCH_MODULE(LayerNormMlp);

}  // namespace pacer::modules
