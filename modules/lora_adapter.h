// A low-rank adapter of a layer (Hu et al., "LoRA", arXiv:2106.09685): it adds scale * B (A drop(x)) to what
// the layer computes, and only it is trained. lora.h adds it to a model, lora_layer.h to a layer.
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
  // The probability with which an element of x is dropped in train(), in [0, 1). An embedding drops nothing,
  // because its x are indices.
  TORCH_ARG(double, dropout) = 0;
  // The weights of a row are trained as a direction and its length (Liu et al., "DoRA", arXiv:2402.09353): the
  // layer computes m / |W + scale * B A| (W x + scale * B A x), where the norm is that of each row and m, one
  // number a row, is trained with A and B. For pacer::modules::Linear alone.
  TORCH_ARG(bool, dora) = false;
  // Which layers; see matches_target in lora.h.
  TORCH_ARG(std::vector<std::string>, targets);
  // Several adapters of a model have different names.
  TORCH_ARG(std::string, name) = "default";
};

// The kinds of layers that take adapters.
enum class LoraKind { linear, convolution, embedding };

// The shapes of an adapter's matrices, which have the form of its layer: of a linear layer [r, in] and
// [out, r]; of a convolution [r, in, kernel...] and [out, r / groups, 1...]; of an embedding
// [r, num_embeddings] and [embedding_dim, r].
struct LoraMatrices {
  LoraKind kind;
  std::vector<int64_t> a, b;
};

class LoraAdapterImpl : public torch::nn::Cloneable<LoraAdapterImpl> {
 public:
  // One of the two matrices is 0 at first, so that the layer computes what it did: B, where A is uniform in
  // +-1 / sqrt(elements of a row of A); of an embedding A, where B is of the standard normal distribution.
  // Both are fp32.
  LoraAdapterImpl(const LoraMatrices& matrices, const LoraOptions& options);
  // That of a linear layer.
  LoraAdapterImpl(int64_t in_features, int64_t out_features, const LoraOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  int64_t r() const { return options.r(); }
  double alpha() const { return options.alpha().value_or(static_cast<double>(options.r())); }
  double scale() const;

  // Returns the sum of the layer's weight and scale * B A in the dtype of `weight`, fp32 or fp64; with
  // LoraOptions::dora its rows then have the lengths `magnitude`. Not for a convolution with groups.
  at::Tensor merged_into(const at::Tensor& weight) const;
  // Returns by what LoraOptions::dora multiplies what the layer computes, fp32 or fp64, [out]: magnitude over
  // the lengths of the rows of weight + scale * B A, which count as constants in the gradient. `weight` has
  // any floating-point dtype.
  at::Tensor row_factors(const at::Tensor& weight) const;
  // Makes `magnitude` the lengths of the rows of weight + scale * B A, as it is at first.
  void reset_magnitude(const at::Tensor& weight);

  LoraMatrices matrices;
  LoraOptions options;
  at::Tensor A;
  at::Tensor B;
  at::Tensor magnitude;  // [out], with LoraOptions::dora; else undefined

 private:
  at::Tensor plain_sum(const at::Tensor& weight) const;
};
TORCH_MODULE(LoraAdapter);

}  // namespace pacer::modules
