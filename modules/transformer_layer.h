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

namespace pacer::modules {

struct TransformerLayerOptions {
  TransformerLayerOptions(int64_t hidden, int64_t heads) : hidden_(hidden), heads_(heads), ffn_(4 * hidden) {}
  TORCH_ARG(int64_t, hidden);
  TORCH_ARG(int64_t, heads);  // divides hidden
  TORCH_ARG(int64_t, ffn);    // 4 * hidden if not given
  TORCH_ARG(Activation, activation) = Activation::gelu;
  TORCH_ARG(bool, causal) = false;
  // How far causal attention looks back; needs causal(true). Copies of the options share the window.
  TORCH_ARG(std::optional<AttentionWindow>, window);
  TORCH_ARG(bool, bias) = true;  // of all linear layers
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
  // Its rows are [3][heads][hidden / heads]: queries, keys, values.
  LayerNormLinear qkv = nullptr;
  Linear projection = nullptr;
  LayerNormMlp mlp = nullptr;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})
};
TORCH_MODULE(TransformerLayer);

}  // namespace pacer::modules
