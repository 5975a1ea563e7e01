// The model that pacer-bench overlap trains, its training in a Session, and a row of its tables.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>

#include <pacer/pacer.h>

#include "support/nearest_name.h"  // of examples/
#include "support/ranks.h"
#include "support/table.h"

namespace bench::overlap {

using torch::Tensor;

struct Shape {
  std::string name;
  int64_t layers, width, heads, vocabulary, length, batch;
};

inline Shape shape_named(const std::string& name) {
  if (name == "gpt2") return {name, 12, 768, 12, 50257, 1024, 16};
  if (name == "bert-large") return {name, 24, 1024, 16, 30522, 512, 16};
  pacer::require(name == "tiny", "there is no model '", name, "'; ",
                 examples::suggestion(name, {"gpt2", "bert-large", "tiny"}));
  return {"tiny", 2, 64, 2, 1000, 64, 2};
}

// torch::nn::Linear adds its bias in a kernel of its own where its input has three dimensions; Python's does
// not.
inline Tensor project(torch::nn::Linear& linear, const Tensor& x) {
  return at::linear(x, linear->weight, linear->bias);
}

// The layers of a GPT, without dropout; ddp_peer.py builds the same.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, int64_t heads) : heads(heads) {
    const auto norm = torch::nn::LayerNormOptions({width});
    norm1 = register_module("norm1", torch::nn::LayerNorm(norm));
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
    out = register_module("out", torch::nn::Linear(width, width));
    norm2 = register_module("norm2", torch::nn::LayerNorm(norm));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }
  Tensor forward(const Tensor& x) {
    const int64_t b = x.size(0), s = x.size(1), w = x.size(2);
    const auto parts =
        project(qkv, norm1(x)).view({b, s, 3, heads, w / heads}).permute({2, 0, 3, 1, 4}).unbind(0);
    const Tensor mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    const Tensor y = x + project(out, mixed.transpose(1, 2).reshape({b, s, w}));
    return y + project(down, torch::gelu(project(up, norm2(y)), "tanh"));
  }
  int64_t heads;
  torch::nn::LayerNorm norm1 = nullptr, norm2 = nullptr;
  torch::nn::Linear qkv = nullptr, out = nullptr, up = nullptr, down = nullptr;
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(const Shape& shape) : shape(shape) {
    tokens = register_module("tokens", torch::nn::Embedding(shape.vocabulary, shape.width));
    positions = register_module("positions", torch::nn::Embedding(shape.length, shape.width));
    for (int64_t i = 0; i < shape.layers; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block(shape.width, shape.heads)));
    }
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({shape.width})));
  }
  Tensor loss(const Tensor& ids, const Tensor& targets) {
    // In this order, as Python does: backward then ends with the tied embedding. Operands of + have none in
    // C++.
    Tensor x = tokens(ids);
    x = x + positions(torch::arange(ids.size(1), ids.options()));
    for (auto& block : blocks) x = block(x);
    const Tensor logits = torch::linear(norm(x), tokens->weight);  // tied
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
  }
  Shape shape;
  torch::nn::Embedding tokens = nullptr, positions = nullptr;
  std::vector<Block> blocks;
  torch::nn::LayerNorm norm = nullptr;
};
TORCH_MODULE(Model);

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<Tensor>, const World&)>;

inline std::unique_ptr<torch::optim::Optimizer> adamw(std::vector<Tensor> parameters, const World&) {
  return std::make_unique<pacer::FusedAdamW>(std::move(parameters), pacer::FusedAdamWOptions(1e-5));
}

struct Training {
  Training(
      const Shape& shape, const World& world, bool together,
      const std::function<void(pacer::Session&)>& hooks = [](pacer::Session&) {},
      const MakeOptimizer& make = adamw)
      : model(shape) {
    model->to(world->device());
    optimizer = make(model->parameters(), world);
    session = std::make_unique<pacer::Session>(
        *model, *optimizer, together ? world : pacer::Communicator::alone(world->device()));
    session->use(pacer::Precision::bf16());
    hooks(*session);
    const auto options = at::TensorOptions().dtype(at::kLong).device(world->device());
    ids = torch::randint(shape.vocabulary, {shape.batch, shape.length}, options);
    targets = torch::randint(shape.vocabulary, {shape.batch, shape.length}, options);
  }
  void backward() {
    auto [x, y] = session->begin(ids, targets);
    session->backward(model->loss(x, y));
  }
  void step() {
    backward();
    session->step();
  }
  Model model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<pacer::Session> session;
  // Different ones: a tied embedding of unit variance predicts its own input without an error, and all
  // gradients would be zero.
  Tensor ids, targets;
};

inline void print(pacer::Communicator& world, const std::string& what, double milliseconds) {
  if (world.rank() == 0) print_row({what, format("%.3f", milliseconds)});
}

}  // namespace bench::overlap
