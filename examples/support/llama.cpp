#include "support/llama.h"

#include <cmath>
#include <memory>

#include <ATen/ATen.h>
#include <torch/nn/init.h>

#include <pacer/core/error.h>

namespace examples {
namespace {

constexpr double kDeviation = 0.02;  // of every matrix at first

pacer::modules::Linear matrix(int64_t in, int64_t out) {
  pacer::modules::Linear linear(torch::nn::LinearOptions(in, out).bias(false));
  torch::nn::init::normal_(linear->weight, 0, kDeviation);
  return linear;
}

// Turns the first half of each head against the second by the angles of its position.
torch::Tensor rotate(const torch::Tensor& x, const torch::Tensor& cosines, const torch::Tensor& sines) {
  if (!cosines.defined()) return x;
  const auto halves = x.chunk(2, -1);
  return x * cosines + at::cat({-halves[1], halves[0]}, -1) * sines;
}

}  // namespace

RmsNormImpl::RmsNormImpl(int64_t features, double eps)
    : weight_(register_parameter("weight", at::ones({features}))), eps_(eps) {}

torch::Tensor RmsNormImpl::forward(const torch::Tensor& x) {
  return at::rms_norm(x, weight_.sizes(), weight_.to(x.scalar_type()), eps_);
}

LlamaAttentionImpl::LlamaAttentionImpl(const LlamaConfig& config) : config_(config) {
  const int64_t key_values = config.hidden / config.heads * config.key_value_heads;
  q_ = register_module("q_proj", matrix(config.hidden, config.hidden));
  k_ = register_module("k_proj", matrix(config.hidden, key_values));
  v_ = register_module("v_proj", matrix(config.hidden, key_values));
  o_ = register_module("o_proj", matrix(config.hidden, config.hidden));
}

torch::Tensor LlamaAttentionImpl::forward(const torch::Tensor& x, const torch::Tensor& cosines,
                                          const torch::Tensor& sines) {
  const auto qkv = pacer::modules::forward_together(x, {q_, k_, v_});
  const auto by_heads = [&](const torch::Tensor& rows, int64_t heads) {
    return rows.view({x.size(0), x.size(1), heads, rows.size(-1) / heads}).transpose(1, 2);
  };
  const auto q = rotate(by_heads(qkv[0], config_.heads), cosines, sines);
  const auto k = rotate(by_heads(qkv[1], config_.key_value_heads), cosines, sines);
  const auto v = by_heads(qkv[2], config_.key_value_heads);
  const auto mixed = at::scaled_dot_product_attention(
      q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true, /*scale=*/{},
      /*enable_gqa=*/config_.heads != config_.key_value_heads);
  return o_(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), -1}));
}

LlamaMlpImpl::LlamaMlpImpl(const LlamaConfig& config)
    : gate_(register_module("gate_proj", matrix(config.hidden, config.intermediate))),
      up_(register_module("up_proj", matrix(config.hidden, config.intermediate))),
      down_(register_module("down_proj", matrix(config.intermediate, config.hidden))) {}

torch::Tensor LlamaMlpImpl::forward(const torch::Tensor& x) {
  const auto both = pacer::modules::forward_together(x, {gate_, up_});
  return down_(at::silu(both[0]) * both[1]);
}

LlamaLayerImpl::LlamaLayerImpl(const LlamaConfig& config)
    : attention_(register_module("self_attn", LlamaAttention(config))),
      mlp_(register_module("mlp", LlamaMlp(config))),
      input_norm_(register_module("input_layernorm", RmsNorm(config.hidden, config.norm_eps))),
      attended_norm_(register_module("post_attention_layernorm", RmsNorm(config.hidden, config.norm_eps))) {}

torch::Tensor LlamaLayerImpl::forward(const torch::Tensor& x, const torch::Tensor& cosines,
                                      const torch::Tensor& sines) {
  const auto attended = x + attention_(input_norm_(x), cosines, sines);
  return attended + mlp_(attended_norm_(attended));
}

LlamaImpl::LlamaImpl(const LlamaConfig& config) : config_(config) {
  pacer::require(config.heads > 0 && config.hidden % (2 * config.heads) == 0 && config.key_value_heads > 0 &&
                     config.heads % config.key_value_heads == 0,
                 "a Llama of width ", config.hidden, " cannot have ", config.heads, " heads with ",
                 config.key_value_heads, " for keys and values");
  auto model = register_module("model", std::make_shared<torch::nn::Module>());
  embedding_ = model->register_module("embed_tokens", torch::nn::Embedding(config.vocabulary, config.hidden));
  torch::nn::init::normal_(embedding_->weight, 0, kDeviation);
  model->register_module("layers", layers);
  for (int64_t i = 0; i < config.layers; ++i) layers->push_back(LlamaLayer(config));
  norm_ = model->register_module("norm", RmsNorm(config.hidden, config.norm_eps));
  head_ = register_module("lm_head", matrix(config.hidden, config.vocabulary));
}

torch::Tensor LlamaImpl::forward(const torch::Tensor& tokens) {
  auto x = embedding_(tokens);
  const int64_t width = config_.hidden / config_.heads;
  const auto floats = torch::dtype(at::kFloat).device(x.device());
  const auto frequencies = at::pow(config_.rope_theta, at::arange(0, width, 2, floats) / -double(width));
  const auto angles = at::outer(at::arange(tokens.size(1), floats), frequencies).repeat({1, 2});
  const auto cosines = angles.cos().to(x.scalar_type()), sines = angles.sin().to(x.scalar_type());
  for (size_t i = 0; i < layers->size(); ++i) {
    x = layers->run(i, &LlamaLayerImpl::forward, x, cosines, sines);
  }
  return head_(norm_(x));
}

}  // namespace examples
