// The model of the study: a byte-level GPT. Pre-layer-norm blocks, learned positions, causal attention, a
// GELU MLP four times as wide as the model, initialised like GPT-2. The output head is tied to the byte
// embedding, as in GPT-2. Blocks are called through pacer::Blocks, so that an arm's hooks may drop or
// recompute them, and are LibTorch's modules, or pacer::modules::TransformerLayer with the same weights. It
// holds no training code and no dropout: every arm sees the same function of weights and batch, and of the
// gates.
#pragma once

#include <cstdint>

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <pacer/modules/blocks.h>
#include <pacer/modules/linear.h>

namespace convergence {

constexpr int64_t kVocabulary = 256;  // one entry per byte value

struct GptConfig {
  int64_t layers = 4;
  int64_t width = 128;
  int64_t heads = 4;        // must divide width
  int64_t positions = 128;  // the longest sequence
  bool fused = false;       // blocks are pacer::modules::TransformerLayer
};

class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(const GptConfig& config, double residual_deviation);
  torch::Tensor forward(const torch::Tensor& x);  // (batch, sequence, width), same shape back

 private:
  torch::Tensor attend(const torch::Tensor& x);

  int64_t heads_;
  torch::nn::LayerNorm attention_norm_ = nullptr;
  pacer::modules::Linear query_key_value_ = nullptr;
  pacer::modules::Linear attention_output_ = nullptr;
  torch::nn::LayerNorm mlp_norm_ = nullptr;
  pacer::modules::Linear mlp_input_ = nullptr;
  pacer::modules::Linear mlp_output_ = nullptr;
};
TORCH_MODULE(Block);

class GptImpl : public torch::nn::Module {
 public:
  // Draws the weights from LibTorch's default generator: call torch::manual_seed first.
  explicit GptImpl(const GptConfig& config);

  // Bytes as int64 (batch, sequence), sequence <= positions; returns logits (batch, sequence, 256).
  torch::Tensor forward(const torch::Tensor& bytes);
  // What comes before the blocks, of bytes, and what comes behind them; x (batch, sequence, width).
  torch::Tensor embed(const torch::Tensor& bytes);
  torch::Tensor logits(const torch::Tensor& x);

  // The embedding of bytes (256, width), which makes the logits, too.
  const torch::Tensor& byte_weight() const { return byte_embedding_->weight; }
  // The learned positions (positions, width).
  const torch::Tensor& position_weight() const { return position_embedding_->weight; }
  const pacer::Blocks& blocks() const { return blocks_; }

 private:
  torch::nn::Embedding byte_embedding_ = nullptr;
  torch::nn::Embedding position_embedding_ = nullptr;
  pacer::Blocks blocks_;
  bool is_fused_;
  torch::nn::LayerNorm output_norm_ = nullptr;
};
TORCH_MODULE(Gpt);

// Mean cross entropy in nats of the logits (batch, sequence, 256) against the bytes that follow (batch,
// sequence).
torch::Tensor next_byte_loss(const torch::Tensor& logits, const torch::Tensor& targets);

}  // namespace convergence
