#include "vision_transformer.h"

#include <ATen/ATen.h>
#include <torch/nn/init.h>

namespace {

constexpr double kDeviation = 0.02;  // of all matrices and positions at first

torch::nn::Linear make_linear(int64_t inputs, int64_t outputs) {
  torch::nn::Linear linear(inputs, outputs);
  torch::nn::init::normal_(linear->weight, 0, kDeviation);
  torch::nn::init::zeros_(linear->bias);
  return linear;
}

torch::nn::LayerNorm make_norm(int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
}

}  // namespace

VisionBlockImpl::VisionBlockImpl(const VisionConfig& config) : heads_(config.heads) {
  const int64_t width = config.width;
  attention_norm_ = register_module("attention_norm", make_norm(width));
  query_key_value_ = register_module("query_key_value", make_linear(width, 3 * width));
  attention_output_ = register_module("attention_output", make_linear(width, width));
  mlp_norm_ = register_module("mlp_norm", make_norm(width));
  up_ = register_module("up", make_linear(width, 4 * width));
  down_ = register_module("down", make_linear(4 * width, width));
}

torch::Tensor VisionBlockImpl::forward(const torch::Tensor& x) {
  const auto heads = query_key_value_(attention_norm_(x))
                         .view({x.size(0), x.size(1), 3, heads_, x.size(2) / heads_})
                         .permute({2, 0, 3, 1, 4});  // [3, batch, heads, patches, width / heads]
  const auto mixed = at::scaled_dot_product_attention(heads[0], heads[1], heads[2]);
  const auto attended = x + attention_output_(mixed.transpose(1, 2).reshape(x.sizes()));
  return attended + down_(at::gelu(up_(mlp_norm_(attended))));
}

VisionTransformerImpl::VisionTransformerImpl(const VisionConfig& config) : patch_(config.patch) {
  const int64_t along = config.side / config.patch;
  patches_ = register_module("patches", make_linear(patch_ * patch_, config.width));
  positions_ = register_parameter("positions", kDeviation * at::randn({along * along, config.width}));
  register_module("blocks", blocks);
  for (int64_t i = 0; i < config.layers; ++i) blocks->push_back(VisionBlock(config));
  norm_ = register_module("norm", make_norm(config.width));
  head_ = register_module("head", make_linear(config.width, config.classes));
}

torch::Tensor VisionTransformerImpl::forward(const torch::Tensor& pixels) {
  const int64_t along = pixels.size(1) / patch_;
  const auto patches = pixels.view({-1, along, patch_, along, patch_})
                           .transpose(2, 3)
                           .reshape({-1, along * along, patch_ * patch_});
  torch::Tensor x = patches_(patches) + positions_;
  for (size_t i = 0; i < blocks->size(); ++i) x = blocks->run(i, &VisionBlockImpl::forward, x);
  return head_(norm_(x).mean(1));
}
