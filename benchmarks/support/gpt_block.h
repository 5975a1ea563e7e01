// A block of a GPT in bf16, and the layers around its blocks. Weights are made where they train, because the
// modules of LibTorch draw their first values on the CPU, which takes long for a billion of them.
#pragma once

#include <cmath>
#include <cstdint>

#include <ATen/ops/empty.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>

#include <pacer/modules/linear.h>

namespace bench {

using torch::Tensor;

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

constexpr int64_t kHeadSize = 128;

// A pre-norm block of attention and an MLP, [B, T, width] -> the same.
struct GptBlockImpl : torch::nn::Module {
  GptBlockImpl(int64_t width, const at::TensorOptions& options)
      : norm1(register_module("norm1", layer_norm(width))),
        qkv(register_module("qkv", Projection(width, 3 * width, options))),
        out(register_module("out", Projection(width, width, options))),
        norm2(register_module("norm2", layer_norm(width))),
        up(register_module("up", Projection(width, 4 * width, options))),
        down(register_module("down", Projection(4 * width, width, options))) {}
  Tensor forward(const Tensor& x) {
    const int64_t b = x.size(0), t = x.size(1), width = x.size(2);
    const auto heads = [&](const Tensor& part) {
      return part.view({b, t, width / kHeadSize, kHeadSize}).transpose(1, 2);
    };
    const auto parts = qkv(norm1(x)).chunk(3, -1);
    const Tensor mixed = at::scaled_dot_product_attention(heads(parts[0]), heads(parts[1]), heads(parts[2]),
                                                          {}, 0.0, /*is_causal=*/true);
    const Tensor y = x + out(mixed.transpose(1, 2).reshape({b, t, width}));
    return y + down(torch::gelu(up(norm2(y))));
  }
  torch::nn::LayerNorm norm1;
  Projection qkv, out;
  torch::nn::LayerNorm norm2;
  Projection up, down;
};
TORCH_MODULE(GptBlock);

}  // namespace bench
