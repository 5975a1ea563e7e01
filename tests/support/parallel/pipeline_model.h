// A small language model and its data: what the tests of Pipeline train, on threads and in processes.
#pragma once

#include <cstdint>
#include <utility>

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <pacer/modules/blocks.h>
#include <pacer/modules/linear.h>

namespace pacer::testing::pipelines {

using torch::Tensor;

constexpr int64_t kWidth = 16, kWords = 11;

// Pre-norm, with a mean over all earlier positions in the place of attention.
struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        mix(register_module("mix", modules::Linear(kWidth, kWidth))),
        up(register_module("up", torch::nn::Linear(kWidth, 2 * kWidth))),
        down(register_module("down", torch::nn::Linear(2 * kWidth, kWidth))) {}
  Tensor forward(Tensor x) {
    const Tensor y = x + mix(norm(x)).cumsum(1) / 8;
    if (is_training()) {
      const torch::NoGradGuard no_grad;
      running_mean.mul_(0.9).add_(y.detach().to(torch::kFloat).flatten(0, 1).mean(0), 0.1);
    }
    return y + down(torch::gelu(up(norm(y))));
  }
  torch::nn::LayerNorm norm;
  Tensor running_mean = register_buffer("running_mean", torch::zeros({kWidth}));  // of training
  modules::Linear mix;  // the one that can multiply 8-bit floats
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

struct LanguageModelImpl : torch::nn::Module {
  explicit LanguageModelImpl(int64_t depth, bool is_tied = false)
      : embedding(register_module("embedding", torch::nn::Embedding(kWords, kWidth))) {
    register_module("blocks", blocks);
    for (int64_t i = 0; i < depth; ++i) blocks->push_back(Block());
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    if (is_tied) return;
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWords).bias(false)));
  }
  Tensor embed(Tensor tokens) { return embedding(tokens); }
  Tensor loss(Tensor x, Tensor targets) {
    const Tensor logits = torch::linear(norm(x), head ? head->weight : embedding->weight);
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
  }
  Tensor forward(Tensor tokens, Tensor targets) {
    Tensor x = embed(tokens);
    for (size_t i = 0; i < blocks->size(); ++i) x = blocks->run(i, &BlockImpl::forward, x);
    return loss(x, targets);
  }
  torch::nn::Embedding embedding;
  Blocks blocks;
  torch::nn::LayerNorm norm = nullptr;
  torch::nn::Linear head = nullptr;
};
TORCH_MODULE(LanguageModel);

// Batch number `step` of a replica: tokens and targets, [rows, length] each, int64.
inline std::pair<Tensor, Tensor> batch_of(int64_t rows, int64_t step, int64_t replica = 0,
                                          int64_t length = 12) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(1000 * step + replica));
  const Tensor text = torch::randint(kWords, {rows, length + 1}, generator);
  return {text.narrow(1, 0, length).contiguous(), text.narrow(1, 1, length).contiguous()};
}

}  // namespace pacer::testing::pipelines
