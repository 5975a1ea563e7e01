// What pacer-bench sharding trains: a GPT of plain layers and a row of small blocks, both in bf16, with their
// blocks in a pacer::Blocks. peer.py builds the same.
#pragma once

#include <cstdint>
#include <utility>

#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/loss.h>
#include <torch/types.h>

#include <pacer/modules/blocks.h>
#include <pacer/modules/transformer_layer.h>

#include "support/gpt_block.h"

namespace bench::sharding {

struct Shape {
  int64_t layers = 24, width = 2048, batch = 8, sequence = 1024;
};

// Inputs and targets of a rank, which are the same in every step.
using Batch = std::pair<Tensor, Tensor>;

// Modules are registered in the order of their use, which is the order in which Shards expects them.
struct ModelImpl : torch::nn::Module {
  virtual Tensor loss(const Tensor& inputs, const Tensor& targets) = 0;
  virtual Batch draw_batch() const = 0;
  pacer::Blocks blocks;
};

// The same block as one fused layer, with weights drawn alike.
inline pacer::modules::TransformerLayer fused_block(int64_t width, const at::TensorOptions& options) {
  pacer::modules::TransformerLayer layer(
      pacer::modules::TransformerLayerOptions(width, width / kHeadSize).causal(true));
  layer->to(options.device(), c10::typeMetaToScalarType(options.dtype()));
  for (Tensor& parameter : layer->parameters()) {
    if (parameter.dim() == 2) parameter.data().normal_(0, 0.02);
  }
  return layer;
}

// Token ids [B, T] and the next ones, [B, T], to their cross entropy in fp32.
struct GptImpl : ModelImpl {
  static constexpr int64_t kVocabulary = 32768;

  GptImpl(const Shape& shape, const at::TensorOptions& options, bool fused)
      : shape(shape), options(options), is_fused(fused) {
    tokens = register_module("tokens", embedding(kVocabulary, shape.width, options));
    positions = register_module("positions", embedding(shape.sequence, shape.width, options));
    register_module("blocks", blocks);
    for (int64_t i = 0; i < shape.layers; ++i) {
      fused ? blocks->push_back(fused_block(shape.width, options))
            : blocks->push_back(GptBlock(shape.width, options));
    }
    norm = register_module("norm", layer_norm(shape.width));
    head = register_module("head", Projection(shape.width, kVocabulary, options, /*has_bias=*/false));
  }
  Tensor loss(const Tensor& inputs, const Tensor& targets) override {
    Tensor x = tokens(inputs);
    x = x + positions->weight.narrow(0, 0, inputs.size(1));
    for (size_t i = 0; i < blocks->size(); ++i) {
      x = is_fused ? blocks->run(i, &pacer::modules::TransformerLayerImpl::forward, x, Tensor())
                   : blocks->run(i, &GptBlockImpl::forward, x);
    }
    const Tensor logits = head(norm(x)).flatten(0, 1).to(at::kFloat);
    return torch::nn::functional::cross_entropy(logits, targets.flatten());
  }
  Batch draw_batch() const override {
    const Tensor ids =
        torch::randint(kVocabulary, {shape.batch, shape.sequence + 1}, options.dtype(at::kLong));
    return {ids.narrow(1, 0, shape.sequence), ids.narrow(1, 1, shape.sequence)};
  }
  Shape shape;
  at::TensorOptions options;
  bool is_fused;
  torch::nn::Embedding tokens = nullptr, positions = nullptr;
  torch::nn::LayerNorm norm = nullptr;
  Projection head = nullptr;
};

// A million parameters and hardly any arithmetic: [32, 724] -> the same.
struct SmallBlockImpl : torch::nn::Module {
  static constexpr int64_t kWidth = 724;
  explicit SmallBlockImpl(const at::TensorOptions& options)
      : up(register_module("up", Projection(kWidth, kWidth, options))),
        down(register_module("down", Projection(kWidth, kWidth, options))) {}
  Tensor forward(const Tensor& x) { return x + down(torch::relu(up(x))); }
  Projection up, down;
};
TORCH_MODULE(SmallBlock);

struct SmallBlocksImpl : ModelImpl {
  static constexpr int64_t kBlocks = 64, kBatch = 32;

  explicit SmallBlocksImpl(const at::TensorOptions& options) : options(options) {
    register_module("blocks", blocks);
    for (int64_t i = 0; i < kBlocks; ++i) blocks->push_back(SmallBlock(options));
  }
  Tensor loss(const Tensor& inputs, const Tensor& targets) override {
    Tensor x = inputs;
    for (size_t i = 0; i < blocks->size(); ++i) x = blocks->run(i, &SmallBlockImpl::forward, x);
    return torch::mse_loss(x.to(at::kFloat), targets);
  }
  Batch draw_batch() const override {
    const Tensor inputs = torch::randn({kBatch, SmallBlockImpl::kWidth}, options);
    return {inputs, torch::randn({kBatch, SmallBlockImpl::kWidth}, options.dtype(at::kFloat))};
  }
  at::TensorOptions options;
};

}  // namespace bench::sharding
