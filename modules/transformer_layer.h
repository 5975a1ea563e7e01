// A transformer layer that normalises before its parts, at the speed of its products: elementwise passes are fused with their
// neighbours, in 16 bits and in 8-bit floats (Fp8Scope, Precision::fp8).
//
//   s = x + dropout(projection(attention(qkv(x))))     qkv: normalisation and one product
//   y = s + dropout(mlp(s))                            mlp: normalisation, fc1, activation, fc2
#pragma once

#include <optional>

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>

#include <pacer/modules/attention_window.h>
#include <pacer/modules/layer_norm_linear.h>
#include <pacer/modules/layer_norm_mlp.h>
#include <pacer/modules/rms_norm.h>
#include <pacer/modules/rotary.h>

namespace pacer::modules {

struct TransformerLayerOptions {
  TransformerLayerOptions(int64_t hidden, int64_t heads) : hidden_(hidden), heads_(heads), ffn_(4 * hidden) {}
  TORCH_ARG(int64_t, hidden);
  TORCH_ARG(int64_t, heads);  // of queries; divides hidden, where head_dim is not given
  TORCH_ARG(int64_t, ffn);    // 4 * hidden if not given
  TORCH_ARG(Activation, activation) = Activation::gelu;
  TORCH_ARG(bool, causal) = false;
  // How far causal attention looks back; needs causal(true). Copies of the options share the window.
  TORCH_ARG(std::optional<AttentionWindow>, window);
  TORCH_ARG(bool, bias) = true;  // of all linear layers
  // Whether qkv has a bias, which Qwen2 has there alone; unset: as bias.
  TORCH_ARG(std::optional<bool>, qkv_bias);
  // Heads of keys and values, which divide those of queries: each serves neighbouring ones (arXiv:2305.13245). Unset: as
  // many as heads.
  TORCH_ARG(std::optional<int64_t>, kv_heads);
  // Channels of a head. Unset: hidden / heads.
  TORCH_ARG(std::optional<int64_t>, head_dim);
  // Positions, by which queries and keys turn; copies of the options share them. A number is their theta.
  TORCH_ARG(std::optional<Rotary>, rotary);
  // Each head of queries and keys is normalised by an RmsNorm of head_dim before it turns, as Qwen3 has it.
  TORCH_ARG(bool, qk_norm) = false;
  // Added to the variance, or to the mean square, in both norms.
  TORCH_ARG(double, eps) = 1e-5;
  // How rows are normalised before qkv and before the network.
  TORCH_ARG(Normalization, normalization) = Normalization::layer;
  // Probabilities in train(): of attention weights, behind the projection, and behind the network.
  TORCH_ARG(double, attention_dropout) = 0;
  TORCH_ARG(double, projection_dropout) = 0;
  TORCH_ARG(double, mlp_dropout) = 0;

 public:
  // All three.
  TransformerLayerOptions& dropout(double p) {
    return attention_dropout(p).projection_dropout(p).mlp_dropout(p);
  }
};

class TransformerLayerImpl : public torch::nn::Cloneable<TransformerLayerImpl> {
 public:
  explicit TransformerLayerImpl(const TransformerLayerOptions& options);

  void reset() override;

  // x [batch, sequence, hidden] in Float, BFloat16 or Half -> the same shape, in the dtype of x, or of
  // autocast where x has other 16 bits. `mask`: as of scaled_dot_product_attention, bool (true takes part) or
  // added, broadcast to [batch, heads, sequence, sequence]; not with causal(true). No second derivative.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& mask = {});

  TransformerLayerOptions options;
  // Its rows are [heads + 2 * kv_heads][head_dim]: queries, keys, values.
  LayerNormLinear qkv = nullptr;
  RmsNorm q_norm = nullptr, k_norm = nullptr;  // null without options.qk_norm()
  Linear projection = nullptr;
  LayerNormMlp mlp = nullptr;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})
};
TORCH_MODULE(TransformerLayer);

}  // namespace pacer::modules
