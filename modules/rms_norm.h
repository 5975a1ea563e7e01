// Normalisation by the root of the mean square (Zhang and Sennrich, arXiv:1910.07467), as Llama and its
// successors have it between their layers and before their heads: y = x / sqrt(mean(x^2) + eps) * weight.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

namespace pacer::modules {

struct RmsNormOptions {
  RmsNormOptions(int64_t features) : features_(features) {}
  TORCH_ARG(int64_t, features);
  TORCH_ARG(double, eps) = 1e-5;  // added to the mean square
};

class RmsNormImpl : public torch::nn::Cloneable<RmsNormImpl> {
 public:
  explicit RmsNormImpl(int64_t features) : RmsNormImpl(RmsNormOptions(features)) {}
  explicit RmsNormImpl(const RmsNormOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  // x [..., features] in Float, BFloat16 or Half -> the same shape in the dtype of autocast, without autocast in
  // that of x. Everything between loading and storing is fp32. No second derivative.
  at::Tensor forward(const at::Tensor& x);

  RmsNormOptions options;
  at::Tensor weight;  // [features], ones
};
TORCH_MODULE(RmsNorm);

}  // namespace pacer::modules
