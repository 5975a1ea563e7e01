#include "byte_gpt.h"

#include <fstream>
#include <iterator>

#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/loss.h>
#include <torch/utils.h>

#include <pacer/core/error.h>

namespace byte_gpt {
namespace {

constexpr int64_t kBytes = 256, kWidth = 48, kHeads = 4, kBlocks = 8;

torch::nn::LayerNorm make_norm() { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})); }

}  // namespace

BlockImpl::BlockImpl() {
  using torch::nn::Linear;
  attention_norm_ = register_module("attention_norm", make_norm());
  query_key_value_ = register_module("query_key_value", Linear(kWidth, 3 * kWidth));
  attention_output_ = register_module("attention_output", Linear(kWidth, kWidth));
  mlp_norm_ = register_module("mlp_norm", make_norm());
  up_ = register_module("up", Linear(kWidth, 4 * kWidth));
  down_ = register_module("down", Linear(4 * kWidth, kWidth));
}

torch::Tensor BlockImpl::forward(const torch::Tensor& x) {
  const auto heads = query_key_value_(attention_norm_(x))
                         .view({x.size(0), x.size(1), 3, kHeads, kWidth / kHeads})
                         .permute({2, 0, 3, 1, 4});  // [3, batch, heads, length, width / heads]
  const auto mixed = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], /*attn_mask=*/{},
                                                      /*dropout_p=*/0.0, /*is_causal=*/true);
  const auto attended = x + attention_output_(mixed.transpose(1, 2).reshape(x.sizes()));
  return attended + down_(torch::gelu(up_(mlp_norm_(attended))));
}

GptImpl::GptImpl() {
  bytes_ = register_module("bytes", torch::nn::Embedding(kBytes, kWidth));
  positions_ = register_module("positions", torch::nn::Embedding(kLength, kWidth));
  register_module("blocks", blocks);
  for (int64_t i = 0; i < kBlocks; ++i) blocks->push_back(Block());
  norm_ = register_module("norm", make_norm());
  head_ = register_module("head", torch::nn::Linear(kWidth, kBytes));
}

torch::Tensor GptImpl::embed(const torch::Tensor& text) {
  return bytes_(text) + positions_(torch::arange(text.size(1), text.options()));
}

torch::Tensor GptImpl::loss(const torch::Tensor& x, const torch::Tensor& targets) {
  return torch::cross_entropy_loss(head_(norm_(x)).flatten(0, 1), targets.flatten());
}

torch::Tensor GptImpl::forward(const torch::Tensor& text, const torch::Tensor& targets) {
  torch::Tensor x = embed(text);
  for (size_t i = 0; i < blocks->size(); ++i) x = blocks->run(i, &BlockImpl::forward, x);
  return loss(x, targets);
}

Gpt make_gpt() {
  torch::manual_seed(1);
  return Gpt();
}

Text::Text(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<uint8_t> bytes((std::istreambuf_iterator<char>(file)), {});
  pacer::require<pacer::Error>(bytes.size() > 1000, "cannot read ", path);
  sequences_ = torch::tensor(std::vector<int64_t>(bytes.begin(), bytes.end())).unfold(0, kLength + 1, 1);
  training_ = sequences_.size(0) * 9 / 10 - kLength;
}

Batch Text::training(const std::vector<size_t>& sequences) const {
  return batch_at(torch::tensor(std::vector<int64_t>(sequences.begin(), sequences.end())));
}

Batch Text::held_out(int64_t count) const {
  const int64_t first = sequences_.size(0) * 9 / 10;
  return batch_at(first + (sequences_.size(0) - first) / count * torch::arange(count));
}

Batch Text::batch_at(const torch::Tensor& starts) const {
  const auto rows = sequences_.index_select(0, starts);
  return {rows.narrow(1, 0, kLength), rows.narrow(1, 1, kLength)};
}

}  // namespace byte_gpt
