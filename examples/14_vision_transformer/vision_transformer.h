// A vision transformer (Dosovitskiy et al., arXiv:2010.11929) of pre-norm blocks. Patches of one channel
// become vectors, positions are learned, and the class is read from the mean of the last vectors.
#pragma once

#include <cstdint>

#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <pacer/modules/blocks.h>

struct VisionConfig {
  int64_t side, classes;  // of the images
  int64_t patch;          // pixels a side; divides `side`
  int64_t layers, width, heads;
};

class VisionBlockImpl : public torch::nn::Module {
 public:
  explicit VisionBlockImpl(const VisionConfig& config);
  // x: [batch, patches, width].
  torch::Tensor forward(const torch::Tensor& x);

 private:
  int64_t heads_;
  torch::nn::LayerNorm attention_norm_ = nullptr, mlp_norm_ = nullptr;
  torch::nn::Linear query_key_value_ = nullptr, attention_output_ = nullptr, up_ = nullptr, down_ = nullptr;
};
TORCH_MODULE(VisionBlock);

class VisionTransformerImpl : public torch::nn::Module {
 public:
  explicit VisionTransformerImpl(const VisionConfig& config);
  // pixels [batch, side, side] -> logits [batch, classes].
  torch::Tensor forward(const torch::Tensor& pixels);

  pacer::Blocks blocks;

 private:
  int64_t patch_;
  torch::nn::Linear patches_ = nullptr, head_ = nullptr;
  torch::nn::LayerNorm norm_ = nullptr;
  torch::Tensor positions_;  // [patches, width]
};
TORCH_MODULE(VisionTransformer);
