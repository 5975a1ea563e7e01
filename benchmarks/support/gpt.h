// The GPT that subcommands train. Weights are made where they train, because the modules of LibTorch draw
// their first values on the CPU, which takes long for a billion of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <pacer/core/error.h>
#include <pacer/modules/blocks.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/linear_cross_entropy.h>
#include <pacer/modules/transformer_layer.h>

namespace bench {

using torch::Tensor;

struct GptShape {
  int64_t layers = 24, width = 2048, length = 1024, vocabulary = 50304;
  int64_t head_size = 128;
  const char* gelu = "none";  // or "tanh", its approximation
  bool is_tied = false;       // whether the head is the embedding of the tokens
  bool is_fused = false;      // blocks are pacer::modules::TransformerLayer
  bool keeps_logits = true;   // or the loss is linear_cross_entropy
};

// Throws pacer::InvalidArgument for a width that was typed and no heads fill.
inline void require_whole_heads(const GptShape& shape) {
  pacer::require(shape.width % shape.head_size == 0, "--width must be a multiple of ", shape.head_size,
                 ", the size of a head");
}

// A linear layer [..., from] -> [..., to], whose bias is added in the kernel of the product, as in Python.
struct ProjectionImpl : pacer::modules::LinearImpl {
  ProjectionImpl(int64_t from, int64_t to, const at::TensorOptions& where, bool has_bias = true)
      : LinearImpl(torch::nn::LinearOptions(0, 0).bias(has_bias)) {
    weight.set_data(at::empty({to, from}, where).normal_(0, 0.02));
    const double bound = 1 / std::sqrt(static_cast<double>(from));
    if (has_bias) bias.set_data(at::empty({to}, where).uniform_(-bound, bound));
  }
};
TORCH_MODULE(Projection);

inline torch::nn::LayerNorm layer_norm(int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
}
inline torch::nn::Embedding embedding(int64_t rows, int64_t width, const at::TensorOptions& options) {
  const Tensor weight = at::empty({rows, width}, options).normal_(0, 0.02);
  return torch::nn::Embedding(torch::nn::EmbeddingOptions(rows, width)._weight(weight));
}

// A pre-norm block of attention and an MLP, [B, T, width] -> the same.
struct GptBlockImpl : torch::nn::Module {
  GptBlockImpl(const GptShape& of, const at::TensorOptions& options)
      : shape(of),
        norm1(register_module("norm1", layer_norm(of.width))),
        qkv(register_module("qkv", Projection(of.width, 3 * of.width, options))),
        out(register_module("out", Projection(of.width, of.width, options))),
        norm2(register_module("norm2", layer_norm(of.width))),
        up(register_module("up", Projection(of.width, 4 * of.width, options))),
        down(register_module("down", Projection(4 * of.width, of.width, options))) {}
  Tensor forward(const Tensor& x) {
    const int64_t b = x.size(0), t = x.size(1), width = x.size(2);
    const auto heads = [&](const Tensor& part) {
      return part.view({b, t, width / shape.head_size, shape.head_size}).transpose(1, 2);
    };
    const auto parts = qkv(norm1(x)).chunk(3, -1);
    const Tensor mixed = at::scaled_dot_product_attention(heads(parts[0]), heads(parts[1]), heads(parts[2]),
                                                          {}, 0.0, /*is_causal=*/true);
    const Tensor y = x + out(mixed.transpose(1, 2).reshape({b, t, width}));
    return y + down(torch::gelu(up(norm2(y)), shape.gelu));
  }
  GptShape shape;
  torch::nn::LayerNorm norm1;
  Projection qkv, out;
  torch::nn::LayerNorm norm2;
  Projection up, down;
};
TORCH_MODULE(GptBlock);

// The same block as one fused layer, with weights drawn alike.
inline pacer::modules::TransformerLayer fused_block(const GptShape& shape, const at::TensorOptions& options) {
  pacer::modules::TransformerLayer layer(
      pacer::modules::TransformerLayerOptions(shape.width, shape.width / shape.head_size).causal(true));
  layer->to(options.device(), c10::typeMetaToScalarType(options.dtype()));
  for (Tensor& parameter : layer->parameters()) {
    if (parameter.dim() == 2) parameter.data().normal_(0, 0.02);
  }
  return layer;
}

// Modules are registered in the order of their use, which is the order in which Shards expects them.
struct GptImpl : torch::nn::Module {
  GptImpl(const GptShape& of, const at::TensorOptions& options)
      : shape(of),
        tokens(register_module("tokens", embedding(of.vocabulary, of.width, options))),
        positions(register_module("positions", embedding(of.length, of.width, options))) {
    register_module("blocks", blocks);
    for (int64_t i = 0; i < of.layers; ++i) {
      of.is_fused ? blocks->push_back(fused_block(of, options)) : blocks->push_back(GptBlock(of, options));
    }
    norm = register_module("norm", layer_norm(of.width));
    if (!of.is_tied) {
      head = register_module("head", Projection(of.width, of.vocabulary, options, /*has_bias=*/false));
    }
    // The norms; all others are there.
    to(options.device(), c10::typeMetaToScalarType(options.dtype()));
  }
  // Token ids [B, T] -> [B, T, width]. In this order, as in Python: backward then ends with the embedding of
  // the tokens. Operands of + have none in C++.
  Tensor embed(const Tensor& ids) {
    const Tensor x = tokens(ids);
    return x + positions->weight.narrow(0, 0, ids.size(1));
  }
  Tensor run_block(size_t i, const Tensor& x) {
    if (!shape.is_fused) return blocks->run(i, &GptBlockImpl::forward, x);
    return blocks->run(i, &pacer::modules::TransformerLayerImpl::forward, x, Tensor());
  }
  // What the last block gives [B, T, width] and the next ids [B, T] -> their cross entropy in fp32.
  Tensor loss_behind_blocks(const Tensor& x, const Tensor& targets) {
    if (!shape.keeps_logits) {
      const Tensor& weight = shape.is_tied ? tokens->weight : head->weight;
      return pacer::modules::linear_cross_entropy(norm(x), weight, targets);
    }
    const Tensor logits = shape.is_tied ? at::linear(norm(x), tokens->weight) : head(norm(x));
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1).to(at::kFloat), targets.flatten());
  }
  Tensor loss(const Tensor& ids, const Tensor& targets) {
    Tensor x = embed(ids);
    for (size_t i = 0; i < blocks->size(); ++i) x = run_block(i, x);
    return loss_behind_blocks(x, targets);
  }
  GptShape shape;
  torch::nn::Embedding tokens, positions;
  pacer::Blocks blocks;
  torch::nn::LayerNorm norm = nullptr;
  Projection head = nullptr;
};
TORCH_MODULE(Gpt);

// Random ids [rows, T] and the next ones.
inline std::pair<Tensor, Tensor> draw_batch(const GptShape& shape, int64_t rows, at::Device device) {
  const auto options = at::TensorOptions().dtype(at::kLong).device(device);
  const Tensor ids = torch::randint(shape.vocabulary, {rows, shape.length + 1}, options);
  return {ids.narrow(1, 0, shape.length).contiguous(), ids.narrow(1, 1, shape.length).contiguous()};
}

}  // namespace bench
