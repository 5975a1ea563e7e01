// A residual stack behind the gates of a LayerDrop, in which blocks may come twice.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <torch/nn/modules/linear.h>

#include <pacer/schedulers/layer_drop.h>

#include "support/session/small_model.h"

namespace pacer::testing {

// [N, kWidth] to a loss; block order[i] is the one behind gate i.
struct GatedStackImpl : torch::nn::Module {
  explicit GatedStackImpl(const std::vector<int64_t>& order)
      : layer_drop(register_module("layer_drop", LayerDrop(early_drops()))), order_(order) {
    torch::manual_seed(2);
    for (int64_t i = 0; i <= *std::max_element(order.begin(), order.end()); ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
    }
    first = register_parameter("first", torch::ones({kWidth}));
    for (const int64_t block : order) layer_drop->add(*blocks[static_cast<size_t>(block)]);
  }
  Tensor loss(const Tensor& input) {
    Tensor x = input * first;
    for (size_t i = 0; i < order_.size(); ++i) {
      auto& block = blocks[static_cast<size_t>(order_[i])];
      x = layer_drop->gate(static_cast<int64_t>(i), x, [&](const Tensor& h) { return h + block(h); });
    }
    return x.square().mean();
  }
  LayerDrop layer_drop;
  std::vector<torch::nn::Linear> blocks;
  Tensor first;

 private:
  std::vector<int64_t> order_;
};
TORCH_MODULE(GatedStack);

}  // namespace pacer::testing
