// Stages of a pipeline that the tests of a backward pass in halves run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/gelu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>

#include <pacer/modules/tensor_call.h>

#include "support/catch.h"

namespace pacer::testing::stages {

using torch::Tensor;
using torch::nn::Module;

constexpr int64_t kBatch = 2, kLength = 8, kSize = 32, kHeads = 4;

// A transformer block, pre-LN, of LibTorch's layers.
struct BlockImpl : Module {
  explicit BlockImpl(double dropout = 0)
      : norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kSize})))),
        norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kSize})))),
        qkv(register_module("qkv", torch::nn::Linear(kSize, 3 * kSize))),
        out(register_module("out", torch::nn::Linear(torch::nn::LinearOptions(kSize, kSize).bias(false)))),
        up(register_module("up", torch::nn::Linear(kSize, 4 * kSize))),
        down(register_module("down", torch::nn::Linear(4 * kSize, kSize))),
        drop(register_module("drop", torch::nn::Dropout(dropout))) {}
  Tensor forward(const Tensor& x) {
    const int64_t batch = x.size(0), length = x.size(1);
    const auto parts =
        qkv(norm1(x)).view({batch, length, 3, kHeads, kSize / kHeads}).permute({2, 0, 3, 1, 4}).unbind(0);
    const Tensor attention = at::scaled_dot_product_attention(parts[0], parts[1], parts[2]);
    const Tensor h = x + drop(out(attention.transpose(1, 2).reshape({batch, length, kSize})));
    return h + drop(down(at::gelu(up(norm2(h)))));
  }

  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Linear qkv, out, up, down;
  torch::nn::Dropout drop;
};
TORCH_MODULE(Block);

// Parameters that belong to no layer.
struct ParametersImpl : Module {
  ParametersImpl(std::vector<std::vector<int64_t>> sizes) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      p.push_back(register_parameter("p" + std::to_string(i), torch::randn(sizes[i])));
    }
  }
  std::vector<Tensor> p;
};

// What a pipeline's rank runs: a function of its inputs with the parameters of a module.
struct Stage {
  std::shared_ptr<Module> module;
  TensorFunction forward;
  std::vector<std::vector<int64_t>> inputs = {{kBatch, kLength, kSize}};
  bool autocast = false;
};

inline Stage three_blocks(double dropout = 0, bool autocast = false) {
  auto blocks = std::make_shared<Module>();
  std::vector<Block> list;
  for (int i = 0; i < 3; ++i) list.push_back(Block(dropout));
  auto module = std::make_shared<ParametersImpl>(std::vector<std::vector<int64_t>>());
  for (size_t i = 0; i < list.size(); ++i) module->register_module(std::to_string(i), list[i]);
  return {module,
          [list](const Tensors& in) mutable {
            Tensor x = in[0];
            for (auto& block : list) x = block(x);
            return Tensors{x};
          },
          {{kBatch, kLength, kSize}},
          autocast};
}

inline void require_same(const std::vector<Tensor>& wanted, const std::vector<Tensor>& found) {
  REQUIRE(wanted.size() == found.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    CAPTURE(i);
    REQUIRE(wanted[i].defined() == found[i].defined());
    if (wanted[i].defined()) REQUIRE(wanted[i].equal(found[i]));
  }
}

}  // namespace pacer::testing::stages
