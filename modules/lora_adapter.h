// A low-rank adapter of a linear layer (Hu et al., "LoRA", arXiv:2106.09685): it adds
// scale * B (A drop(x)) to what the layer computes, and only it is trained. lora.h adds it to a model.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

namespace pacer::modules {

struct LoraOptions {
  LoraOptions(int64_t rank) : r_(rank) {}

  // The rank, at least 1.
  TORCH_ARG(int64_t, r);
  // The scale is alpha / r; unset: r, so that it is 1.
  TORCH_ARG(std::optional<double>, alpha);
  // The scale is alpha / sqrt(r) (Kalajdzievski, arXiv:2312.03732).
  TORCH_ARG(bool, rslora) = false;
  // The probability with which an element of x is dropped in train(), in [0, 1).
  TORCH_ARG(double, dropout) = 0;
  // Which layers; see matches_target in lora.h.
  TORCH_ARG(std::vector<std::string>, targets);
  // Several adapters of a model have different names.
  TORCH_ARG(std::string, name) = "default";
};

class LoraAdapterImpl : public torch::nn::Cloneable<LoraAdapterImpl> {
 public:
  // A is uniform in +-1 / sqrt(in_features), B is 0, both fp32: the layer computes what it did.
  LoraAdapterImpl(int64_t in_features, int64_t out_features, const LoraOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  int64_t r() const { return options.r(); }
  double alpha() const { return options.alpha().value_or(static_cast<double>(options.r())); }
  double scale() const;

  int64_t in_features, out_features;
  LoraOptions options;
  at::Tensor A;  // [r, in_features]
  at::Tensor B;  // [out_features, r]
};
TORCH_MODULE(LoraAdapter);

}  // namespace pacer::modules
