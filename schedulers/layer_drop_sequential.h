// A stack of blocks with a gate before each: torch::nn::Sequential for residual blocks under progressive
// layer dropping. Blocks are registered as "0", "1", ... as in Sequential, so parameter names are the same.
//
//   pacer::LayerDropSequential stack(layer_drop);
//   for (int i = 0; i < 12; ++i) stack->push_back(Block(config));
//   x = stack->forward(x);
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <pacer/core/error.h>
#include <pacer/schedulers/layer_drop.h>

namespace pacer {

class LayerDropSequentialImpl : public torch::nn::Module {
 public:
  // The gates; registered here as "layer_drop".
  explicit LayerDropSequentialImpl(LayerDrop gates) : gates_(std::move(gates)) {
    require(!gates_.is_empty(), "LayerDropSequential was given an empty LayerDrop");
    register_module("layer_drop", gates_);
  }

  // A module holder whose forward takes a tensor and returns one of the same shape.
  template <class Holder>
  void push_back(Holder block) {
    register_module(std::to_string(blocks_.size()), block.ptr());
    layers_.push_back(gates_->add(*block));
    blocks_.emplace_back([block](const at::Tensor& x) mutable { return block->forward(x); });
  }

  // Runs the blocks in order, each behind its gate.
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < blocks_.size(); ++i) x = gates_->gate(layers_[i], x, blocks_[i]);
    return x;
  }

  size_t size() const { return blocks_.size(); }

 private:
  LayerDrop gates_;
  std::vector<int64_t> layers_;
  std::vector<std::function<at::Tensor(const at::Tensor&)>> blocks_;
};

TORCH_MODULE(LayerDropSequential);

}  // namespace pacer
