// What pacer-bench pipeline trains: a GPT in bf16 whose head is not tied.
#pragma once

#include <cstdint>
#include <utility>

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <pacer/modules/blocks.h>

#include "support/gpt_block.h"

namespace bench::pipeline {

struct Shape {
  int64_t layers = 24, width = 2048, length = 1024, vocabulary = 50304;
  int64_t micro_batches = 8, rows = 4;  // rows of a micro-batch

  int64_t tokens() const { return micro_batches * rows * length; }  // of a step
};

struct GptImpl : torch::nn::Module {
  GptImpl(const Shape& shape, const at::TensorOptions& options)
      : tokens(register_module("tokens", embedding(shape.vocabulary, shape.width, options))),
        positions(register_module("positions", embedding(shape.length, shape.width, options))) {
    register_module("blocks", blocks);
    for (int64_t i = 0; i < shape.layers; ++i) blocks->push_back(GptBlock(shape.width, options));
    norm = register_module("norm", layer_norm(shape.width));
    head = register_module("head", Projection(shape.width, shape.vocabulary, options, /*has_bias=*/false));
    to(options.device(), at::kBFloat16);  // the norms; all others are there
  }
  // Token ids [B, T] -> [B, T, width].
  Tensor embed(const Tensor& ids) {
    const Tensor x = tokens(ids);
    return x + positions->weight.narrow(0, 0, ids.size(1));
  }
  // [B, T, width] and the next ids [B, T] -> their cross entropy in fp32.
  Tensor loss(const Tensor& x, const Tensor& targets) {
    const Tensor logits = head(norm(x)).flatten(0, 1).to(at::kFloat);
    return torch::nn::functional::cross_entropy(logits, targets.flatten());
  }
  torch::nn::Embedding tokens, positions;
  pacer::Blocks blocks;
  torch::nn::LayerNorm norm = nullptr;
  Projection head = nullptr;
};
TORCH_MODULE(Gpt);

// Random ids and the next ones of a whole step, the same on every rank.
inline std::pair<Tensor, Tensor> draw_batch(const Shape& shape, at::Device device) {
  torch::manual_seed(1);
  const auto options = at::TensorOptions().dtype(at::kLong).device(device);
  const Tensor ids =
      torch::randint(shape.vocabulary, {shape.micro_batches * shape.rows, shape.length + 1}, options);
  return {ids.narrow(1, 0, shape.length).contiguous(), ids.narrow(1, 1, shape.length).contiguous()};
}

}  // namespace bench::pipeline
