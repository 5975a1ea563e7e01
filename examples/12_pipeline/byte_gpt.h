// The model that the example trains, a byte-level GPT in the three parts that stages need, and its text:
// LibTorch's own header of tensors, which every build has.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <pacer/modules/blocks.h>

namespace byte_gpt {

constexpr int64_t kLength = 32;  // bytes of a sequence

// Pre-norm, with causal attention.
class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl();
  torch::Tensor forward(const torch::Tensor& x);  // [batch, length, width], same shape back

 private:
  torch::nn::LayerNorm attention_norm_ = nullptr, mlp_norm_ = nullptr;
  torch::nn::Linear query_key_value_ = nullptr, attention_output_ = nullptr, up_ = nullptr, down_ = nullptr;
};
TORCH_MODULE(Block);

class GptImpl : public torch::nn::Module {
 public:
  GptImpl();
  // What comes before the blocks ("bytes", "positions"): int64 [batch, length] to [batch, length, width].
  torch::Tensor embed(const torch::Tensor& text);
  // What comes behind them ("norm", "head"): the mean cross entropy in nats a byte.
  torch::Tensor loss(const torch::Tensor& x, const torch::Tensor& targets);
  // All of it.
  torch::Tensor forward(const torch::Tensor& text, const torch::Tensor& targets);

  pacer::Blocks blocks;

 private:
  torch::nn::Embedding bytes_ = nullptr, positions_ = nullptr;
  torch::nn::LayerNorm norm_ = nullptr;
  torch::nn::Linear head_ = nullptr;
};
TORCH_MODULE(Gpt);

// With the same weights at every call.
Gpt make_gpt();

// Bytes and the bytes that follow them, int64 [batch, length] each.
using Batch = std::pair<torch::Tensor, torch::Tensor>;

class Text {
 public:
  // Throws pacer::Error where the file cannot be read.
  explicit Text(const char* path);
  // Sequences to train on, one from each byte of the first nine tenths on.
  size_t size() const { return static_cast<size_t>(training_); }
  Batch training(const std::vector<size_t>& sequences) const;
  // So many sequences, evenly spread over the last tenth.
  Batch held_out(int64_t count) const;

 private:
  Batch batch_at(const torch::Tensor& starts) const;

  torch::Tensor sequences_;  // int64 [bytes - length, length + 1]
  int64_t training_ = 0;
};

}  // namespace byte_gpt
