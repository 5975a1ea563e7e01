// LayerNormLinear, LayerNormMlp and TransformerLayer from their parameters by LibTorch's functions, in the
// dtype of the input (fp64 for exact values) or under autocast.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>

#include <pacer/kernels/math/dropout.h>
#include <pacer/modules/recompute.h>
#include <pacer/modules/transformer_layer.h>

#include "support/catch.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::fused_layers {

// What results are multiplied with, behind the projection and behind the network: 0 or 1 / (1 - p).
struct DroppedElements {
  Tensor of_projection, of_mlp;
};

inline Tensor applied(const Tensor& x, const Tensor& factors) {
  return factors.defined() ? x * factors.view(x.sizes()) : x;
}

inline Tensor like(const Tensor& parameter, const Tensor& x) {
  return parameter.defined() && x.scalar_type() == at::kDouble ? parameter.to(at::kDouble) : parameter;
}

// What a layer multiplies with, in fp64: what its codes stand for, and the adapters that take part.
inline Tensor whole_weight(modules::Linear& linear) {
  Tensor weight =
      linear->nf4().is_empty() ? linear->weight.to(at::kDouble) : linear->nf4()->decode(at::kDouble);
  if (linear->is_merged()) return weight;
  for (const modules::LoraAdapter& adapter : linear->active_adapters()) {
    weight = weight + adapter->scale() * adapter->B.to(at::kDouble).matmul(adapter->A.to(at::kDouble));
  }
  return weight;
}

// In 8 bits where a scope says so and x is not fp64.
inline Tensor linear_of(modules::Linear& linear, const Tensor& x) {
  if (x.scalar_type() != at::kDouble) return linear->forward(x);
  return at::linear(x, whole_weight(linear), like(linear->bias, x));
}

inline Tensor norm_of(torch::nn::LayerNorm& norm, const Tensor& x) {
  return at::layer_norm(x, norm->options.normalized_shape(), like(norm->weight, x), like(norm->bias, x),
                        norm->options.eps());
}

inline Tensor norm_of(modules::RmsNorm& norm, const Tensor& x) {
  const Tensor weight = like(norm->weight, x);  // of the dtype of x, as LibTorch's kernel wants it
  return at::rms_norm(x.to(weight.scalar_type()), {norm->options.features()}, weight, norm->options.eps());
}
template <class Layer>
Tensor norm_of_layer(Layer& layer, const Tensor& x) {
  return layer.rms_norm ? norm_of(layer.rms_norm, x) : norm_of(layer.norm, x);
}

inline Tensor reference(modules::LayerNormLinearImpl& layer, const Tensor& x, const DroppedElements& = {}) {
  return linear_of(layer.linear, norm_of_layer(layer, x));
}

inline Tensor reference(modules::LayerNormMlpImpl& layer, const Tensor& x,
                        const DroppedElements& dropped = {}) {
  const Tensor u = linear_of(layer.fc1, norm_of_layer(layer, x));
  Tensor activated;
  if (layer.options.activation() == Activation::gelu) {
    activated = at::gelu(u, "tanh");
  } else {
    const auto halves = u.chunk(2, -1);
    activated = at::silu(halves[0]) * halves[1];
  }
  const Tensor y = applied(linear_of(layer.fc2, activated), dropped.of_mlp);
  return layer.options.residual() ? x + y : y;
}

// The theta of every layer here that has rotary positions: small, so that few positions turn far.
constexpr double kTheta = 100;

// [batch, sequence, heads, channels] turned by its positions, as transformers' rotate_half has it, in the dtype of x.
inline Tensor turned_of(const Tensor& x, int64_t offset) {
  const auto doubles = at::TensorOptions().dtype(at::kDouble).device(x.device());
  const int64_t half = x.size(3) / 2;
  const Tensor frequencies = at::pow(kTheta, at::arange(half, doubles) * (-1.0 / static_cast<double>(half)));
  const Tensor of_half = (at::arange(x.size(1), doubles) + offset).view({-1, 1, 1}) * frequencies;
  const Tensor angles = at::cat({of_half, of_half}, -1);
  const auto halves = x.chunk(2, -1);
  return x * angles.cos().to(x.scalar_type()) +
         at::cat({-halves[1], halves[0]}, -1) * angles.sin().to(x.scalar_type());
}

inline Tensor reference(modules::TransformerLayerImpl& layer, const Tensor& x,
                        const DroppedElements& dropped = {}, const Tensor& mask = {}) {
  const int64_t heads = layer.options.heads(), kv_heads = layer.options.kv_heads().value_or(heads);
  const Tensor qkv = reference(*layer.qkv, x).view({x.size(0), x.size(1), heads + 2 * kv_heads, -1});
  Tensor q = qkv.narrow(2, 0, heads), k = qkv.narrow(2, heads, kv_heads);
  const Tensor v = qkv.narrow(2, heads + kv_heads, kv_heads);
  if (layer.options.qk_norm()) {
    q = norm_of(layer.q_norm, q).to(qkv.scalar_type());
    k = norm_of(layer.k_norm, k).to(qkv.scalar_type());
  }
  if (layer.options.rotary()) {
    const int64_t offset = layer.options.rotary()->offset();
    q = turned_of(q, offset);
    k = turned_of(k, offset);
  }
  const auto by_heads = [&](const Tensor& some) {
    return some.repeat_interleave(heads / some.size(2), 2).transpose(1, 2);
  };
  std::optional<Tensor> given_mask;
  if (mask.defined()) given_mask = mask;
  const Tensor attended = at::scaled_dot_product_attention(by_heads(q), by_heads(k), by_heads(v), given_mask,
                                                           0.0, layer.options.causal());
  const Tensor branch = linear_of(
      layer.projection, attended.transpose(1, 2).reshape({x.size(0), x.size(1), heads * qkv.size(3)}));
  return reference(*layer.mlp, x + applied(branch, dropped.of_projection), dropped);
}

inline double relative_error(const Tensor& found, const Tensor& wanted) {
  const Tensor expected = wanted.to(at::kDouble);
  const double norm = expected.norm().item<double>();
  return (found.to(at::kDouble) - expected).norm().item<double>() / (norm == 0 ? 1 : norm);
}

// A result and the gradients of the input and of all parameters, by name.
struct Pass {
  Tensor y, dx;
  std::map<std::string, Tensor> gradients;
};

template <class Module, class F>
Pass pass(Module& module, const F& forward, const Tensor& input, const Tensor& dy) {
  module.zero_grad();
  const Tensor x = input.detach().clone().requires_grad_();
  Pass result;
  result.y = forward(x);
  result.y.backward(dy.to(result.y.scalar_type()));
  result.dx = x.grad();
  for (const auto& item : module.named_parameters()) {
    if (item.value().grad().defined()) result.gradients[item.key()] = item.value().grad().clone();
  }
  return result;
}

// The largest relative error over all results.
inline double largest_error(const Pass& found, const Pass& wanted) {
  double largest = std::max(relative_error(found.y, wanted.y), relative_error(found.dx, wanted.dx));
  REQUIRE(found.gradients.size() == wanted.gradients.size());
  for (const auto& [name, gradient] : wanted.gradients) {
    CAPTURE(name);
    largest = std::max(largest, relative_error(found.gradients.at(name), gradient));
  }
  return largest;
}

template <class Module>
Pass fused_pass(Module& module, const Tensor& x, const Tensor& dy) {
  return pass(
      module, [&](const Tensor& in) { return module.forward(in); }, x, dy);
}
template <class Module>
Pass recomputed_pass(Module& module, const Tensor& x, const Tensor& dy) {
  const auto forward = [&](const Tensor& in) { return module.forward(in); };
  return pass(
      module, [&](const Tensor& in) { return recompute(module, forward, in); }, x, dy);
}
template <class Module>
Pass reference_pass(Module& module, const Tensor& x, const Tensor& dy, const DroppedElements& dropped = {}) {
  return pass(
      module, [&](const Tensor& in) { return reference(module, in.to(at::kDouble), dropped); }, x, dy);
}

inline void randomize(torch::nn::Module& module) {
  torch::manual_seed(11);
  for (Tensor& parameter : module.parameters()) {
    torch::NoGradGuard no_grad;
    parameter.copy_(torch::randn(parameter.sizes()) * (parameter.dim() == 2 ? 0.2 : 0.5) +
                    (parameter.dim() == 2 ? 0.0 : 0.3));
  }
}

// Layers of language models: Llama 3's, Qwen2's and Qwen3's.
inline std::vector<modules::TransformerLayerOptions> language_model_layers() {
  const auto common = modules::TransformerLayerOptions(32, 4)
                          .ffn(64)
                          .activation(Activation::swiglu)
                          .normalization(Normalization::rms)
                          .bias(false)
                          .causal(true)
                          .kv_heads(2)
                          .head_dim(16)
                          .rotary(kTheta);
  return {common, modules::TransformerLayerOptions(common).qkv_bias(true).kv_heads(1),
          modules::TransformerLayerOptions(common).qk_norm(true)};
}

template <class Visit>
void for_all_layers(const Visit& visit) {
  for (const modules::TransformerLayerOptions& options : language_model_layers()) {
    visit(modules::TransformerLayer(options));
  }
  // One thing at a time.
  visit(modules::TransformerLayer(modules::TransformerLayerOptions(32, 4).ffn(64).kv_heads(2)));
  visit(modules::TransformerLayer(modules::TransformerLayerOptions(32, 2).ffn(64).qk_norm(true)));
  for (const Normalization normalization : {Normalization::layer, Normalization::rms}) {
    for (const bool bias : {true, false}) {
      visit(modules::LayerNormLinear(
          modules::LayerNormLinearOptions(32, 48).bias(bias).eps(1e-3).normalization(normalization)));
      for (const Activation activation : {Activation::gelu, Activation::swiglu}) {
        // The other combinations are the same code.
        if (normalization == Normalization::rms && bias == (activation == Activation::swiglu)) continue;
        for (const bool residual : {true, false}) {
          visit(modules::LayerNormMlp(modules::LayerNormMlpOptions(32, 64)
                                          .bias(bias)
                                          .activation(activation)
                                          .residual(residual)
                                          .normalization(normalization)));
        }
        visit(modules::TransformerLayer(modules::TransformerLayerOptions(32, 4)
                                            .ffn(64)
                                            .bias(bias)
                                            .activation(activation)
                                            .causal(!bias)
                                            .normalization(normalization)));
      }
    }
  }
}

inline Tensor batch(at::IntArrayRef sizes = {2, 16, 32}) {
  torch::manual_seed(5);
  return torch::randn(sizes);
}

// Of the next seed that LibTorch's generator of the CPU gives.
inline Tensor dropout_factors(double p, at::IntArrayRef sizes) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const uint64_t seed = at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
  const Tensor factors = torch::zeros(sizes, at::kDouble);
  double* values = factors.mutable_data_ptr<double>();
  for (int64_t i = 0; i < factors.numel(); ++i) {
    const PhiloxCounter draws = philox4x32_10(
        philox_key(seed), philox_counter(static_cast<uint64_t>(i / 4), 0, 0, RandomStream::dropout));
    values[i] = draws.word[i % 4] < p * 4294967296.0 ? 0 : 1 / (1 - p);
  }
  return factors;
}

}  // namespace pacer::testing::fused_layers
