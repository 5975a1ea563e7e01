// A small decoder with the architecture of Llama and the module names that Hugging Face gives it, so that
// pacer::load_weights reads such a checkpoint: RMS norms, rotary positions, grouped queries, SwiGLU.
#pragma once

#include <cstdint>

#include <torch/nn/modules/embedding.h>

#include <pacer/modules/blocks.h>
#include <pacer/modules/linear.h>

namespace examples {

struct LlamaConfig {
  int64_t vocabulary = 256;
  int64_t hidden = 128;
  int64_t intermediate = 344;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t key_value_heads = 4;  // divides `heads`
  double rope_theta = 10'000;
  double norm_eps = 1e-5;
};

class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(int64_t features, double eps);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  torch::Tensor weight_;
  double eps_;
};
TORCH_MODULE(RmsNorm);

// self_attn: q_proj, k_proj, v_proj, o_proj.
class LlamaAttentionImpl : public torch::nn::Module {
 public:
  explicit LlamaAttentionImpl(const LlamaConfig& config);
  // x [batch, sequence, hidden]; cosines and sines [sequence, hidden / heads], or undefined: no positions.
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& cosines, const torch::Tensor& sines);

 private:
  LlamaConfig config_;
  pacer::modules::Linear q_ = nullptr, k_ = nullptr, v_ = nullptr, o_ = nullptr;
};
TORCH_MODULE(LlamaAttention);

// mlp: gate_proj, up_proj, down_proj.
class LlamaMlpImpl : public torch::nn::Module {
 public:
  explicit LlamaMlpImpl(const LlamaConfig& config);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  pacer::modules::Linear gate_ = nullptr, up_ = nullptr, down_ = nullptr;
};
TORCH_MODULE(LlamaMlp);

class LlamaLayerImpl : public torch::nn::Module {
 public:
  explicit LlamaLayerImpl(const LlamaConfig& config);
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& cosines, const torch::Tensor& sines);

 private:
  LlamaAttention attention_ = nullptr;
  LlamaMlp mlp_ = nullptr;
  RmsNorm input_norm_ = nullptr, attended_norm_ = nullptr;
};
TORCH_MODULE(LlamaLayer);

// model.embed_tokens, model.layers.N, model.norm, lm_head.
class LlamaImpl : public torch::nn::Module {
 public:
  explicit LlamaImpl(const LlamaConfig& config);
  // int64 [batch, sequence] -> logits [batch, sequence, vocabulary].
  torch::Tensor forward(const torch::Tensor& tokens);

  pacer::Blocks layers;

 private:
  LlamaConfig config_;
  torch::nn::Embedding embedding_ = nullptr;
  RmsNorm norm_ = nullptr;
  pacer::modules::Linear head_ = nullptr;
};
TORCH_MODULE(Llama);

}  // namespace examples
