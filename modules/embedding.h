// An embedding with the options, parameters, names and initial values of torch::nn::Embedding, and its results
// to the bit, that takes low-rank adapters (lora.h).
//
// An adapter adds scale * (A^T)[index] B^T to each vector. A of zeros and B of the standard normal distribution
// are what it begins with. The padding index gets no gradient in A, as it gets none in the weight.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/options/embedding.h>
#include <torch/nn/pimpl.h>

#include <pacer/modules/lora_layer.h>

namespace pacer::modules {

class EmbeddingImpl : public torch::nn::Cloneable<EmbeddingImpl>, public LoraLayer {
 public:
  EmbeddingImpl(int64_t num_embeddings, int64_t embedding_dim)
      : EmbeddingImpl(torch::nn::EmbeddingOptions(num_embeddings, embedding_dim)) {}
  // InvalidArgument for a padding index that is none, and for an options._weight() of another shape, which is
  // the weight otherwise.
  explicit EmbeddingImpl(const torch::nn::EmbeddingOptions& options);

  void reset() override;
  // Draws the weight anew, as torch::nn::Embedding does.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;

  // indices [...], int32 or int64 -> [..., embedding_dim], of the weight's dtype.
  at::Tensor forward(const at::Tensor& indices);

  LoraMatrices lora_matrices(int64_t r) const override;
  std::string why_no_adapter(const LoraOptions& lora) const override;
  at::Tensor stored_weight() const override { return weight; }

  torch::nn::EmbeddingOptions options;  // whose padding index is not negative
  at::Tensor weight;                    // [num_embeddings, embedding_dim]

 private:
  torch::nn::Module& module() override { return *this; }
  at::Tensor rows_of(const at::Tensor& table, const at::Tensor& indices) const;
};
TORCH_MODULE(Embedding);

// Whether it is one of these, or torch's Embedding or EmbeddingBag.
bool is_embedding(const torch::nn::Module& module);

}  // namespace pacer::modules
