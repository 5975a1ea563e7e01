// The byte-level GPT: construction with GPT-2's initialisation, and the forward pass.
#include "gpt.h"

#include <cmath>
#include <vector>

#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/linear.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/init.h>

#include <pacer/modules/transformer_layer.h>

namespace convergence {
namespace {

constexpr double kWeightDeviation = 0.02;  // GPT-2's standard deviation for every matrix

pacer::modules::Linear make_linear(int64_t inputs, int64_t outputs, double deviation) {
  pacer::modules::Linear linear(inputs, outputs);
  torch::nn::init::normal_(linear->weight, 0.0, deviation);
  torch::nn::init::zeros_(linear->bias);
  return linear;
}

// Plain layers add their bias after the product, as torch::nn::Linear does: a study repeats older ones to the
// bit.
torch::Tensor project(pacer::modules::Linear& layer, const torch::Tensor& x) {
  if (layer->is_plain()) return torch::nn::functional::linear(x, layer->weight, layer->bias);
  return layer->forward(x);
}

torch::nn::Embedding make_embedding(int64_t entries, int64_t width) {
  torch::nn::Embedding embedding(entries, width);
  torch::nn::init::normal_(embedding->weight, 0.0, kWeightDeviation);
  return embedding;
}

torch::nn::LayerNorm make_norm(int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
}

// With the weights of the block, which has them in the same order.
pacer::modules::TransformerLayer fused(const Block& block, const GptConfig& config) {
  pacer::modules::TransformerLayer layer(
      pacer::modules::TransformerLayerOptions(config.width, config.heads).causal(true));
  const auto from = block->parameters(), to = layer->parameters();
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
  return layer;
}

}  // namespace

BlockImpl::BlockImpl(const GptConfig& config, double residual_deviation) : heads_(config.heads) {
  const int64_t width = config.width;
  attention_norm_ = register_module("attention_norm", make_norm(width));
  query_key_value_ = register_module("query_key_value", make_linear(width, 3 * width, kWeightDeviation));
  attention_output_ = register_module("attention_output", make_linear(width, width, residual_deviation));
  mlp_norm_ = register_module("mlp_norm", make_norm(width));
  mlp_input_ = register_module("mlp_input", make_linear(width, 4 * width, kWeightDeviation));
  mlp_output_ = register_module("mlp_output", make_linear(4 * width, width, residual_deviation));
}

torch::Tensor BlockImpl::attend(const torch::Tensor& x) {
  const int64_t batch = x.size(0), sequence = x.size(1), width = x.size(2);
  const auto projected = project(query_key_value_, x)
                             .view({batch, sequence, 3, heads_, width / heads_})
                             .permute({2, 0, 3, 1, 4});  // (3, batch, heads, sequence, width / heads)
  const auto mixed =
      at::scaled_dot_product_attention(projected[0], projected[1], projected[2],
                                       /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true);
  return project(attention_output_, mixed.transpose(1, 2).reshape({batch, sequence, width}));
}

torch::Tensor BlockImpl::forward(const torch::Tensor& x) {
  const auto attended = x + attend(attention_norm_->forward(x));
  const auto hidden = at::gelu(project(mlp_input_, mlp_norm_->forward(attended)), "tanh");
  return attended + project(mlp_output_, hidden);
}

GptImpl::GptImpl(const GptConfig& config) : is_fused_(config.fused) {
  // 2L residual branches add up; GPT-2 scales their last matrix so that the sum keeps the variance of one.
  const double residual_deviation = kWeightDeviation / std::sqrt(2.0 * static_cast<double>(config.layers));
  byte_embedding_ = register_module("byte_embedding", make_embedding(kVocabulary, config.width));
  position_embedding_ = register_module("position_embedding", make_embedding(config.positions, config.width));
  register_module("blocks", blocks_);
  std::vector<Block> blocks;  // all of them first, because fused layers draw weights of their own
  for (int64_t i = 0; i < config.layers; ++i) blocks.emplace_back(config, residual_deviation);
  for (const Block& block : blocks) {
    config.fused ? blocks_->push_back(fused(block, config)) : blocks_->push_back(block);
  }
  output_norm_ = register_module("output_norm", make_norm(config.width));
}

torch::Tensor GptImpl::embed(const torch::Tensor& bytes) {
  const auto positions = at::arange(bytes.size(1), bytes.options());
  return byte_embedding_->forward(bytes) + position_embedding_->forward(positions);
}

torch::Tensor GptImpl::logits(const torch::Tensor& x) {
  return at::linear(output_norm_->forward(x), byte_embedding_->weight);
}

torch::Tensor GptImpl::forward(const torch::Tensor& bytes) {
  auto x = embed(bytes);
  for (size_t i = 0; i < blocks_->size(); ++i) {
    x = is_fused_ ? blocks_->run(i, &pacer::modules::TransformerLayerImpl::forward, x, torch::Tensor())
                  : blocks_->run(i, &BlockImpl::forward, x);
  }
  return logits(x);
}

torch::Tensor next_byte_loss(const torch::Tensor& logits, const torch::Tensor& targets) {
  return at::cross_entropy_loss(logits.reshape({-1, kVocabulary}).to(at::kFloat), targets.reshape({-1}));
}

}  // namespace convergence
