// A stack of blocks with parameters of every odd kind: frozen ones, several dtypes, tied ones, none at all;
// for hooks that bring parameters in and out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <torch/nn/modules/common.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <pacer/modules/blocks.h>
#include <pacer/modules/recompute.h>

namespace pacer::testing {

using torch::Tensor;

// Blocks of two layers, of which one may be frozen or of another dtype, between two layers of the root.
struct OddOptions {
  int64_t width = 5, depth = 3;
  int64_t wider = 2;          // by so much the middle of a block
  bool frozen_first = false;  // the first layer of each block
  bool frozen_block = false;  // block 1
  bool double_block = false;  // block 1
  bool tied = false;          // the last block uses the head's bias, too
  bool empty_block = false;   // one more, without parameters
  bool twice = false;         // block 0 is run again at the end
  bool region = false;        // all blocks in one region that is recomputed
  bool no_input_gradient = false;
};

struct OddBlockImpl : torch::nn::Module {
  explicit OddBlockImpl(int64_t width, int64_t wider = 2)
      : up(register_module("up", torch::nn::Linear(width, width + wider))),
        down(register_module("down", torch::nn::Linear(width + wider, width))),
        scale(register_parameter("scale", torch::ones({1}))) {}
  Tensor forward(const Tensor& x) {
    const Tensor y = down(torch::tanh(up(x.to(up->weight.dtype()))) * scale).to(x.dtype());
    return x + (tied.defined() ? y * tied : y);
  }
  torch::nn::Linear up, down;
  Tensor scale, tied;  // `tied` may be undefined
};
TORCH_MODULE(OddBlock);

struct OddModelImpl : torch::nn::Module {
  explicit OddModelImpl(OddOptions odd) : options(odd) {
    register_module("blocks", blocks);
    for (int64_t i = 0; i < odd.depth; ++i) {
      OddBlock block(odd.width, odd.wider);
      if (i == 1 && odd.double_block) block->up->to(at::kDouble);
      if (i == 1 && odd.double_block) block->scale.set_data(block->scale.to(at::kDouble));
      if (i == 1 && odd.double_block) block->down->to(at::kDouble);
      for (Tensor& parameter : block->up->parameters()) parameter.requires_grad_(!odd.frozen_first);
      for (Tensor& parameter : block->parameters()) {
        if (i == 1 && odd.frozen_block) parameter.requires_grad_(false);
      }
      if (i + 1 == odd.depth && odd.tied) block->tied = block->register_parameter("tied", head->bias);
      blocks->push_back(block);
    }
    register_module("entry", entry);
    register_module("head", head);
    if (odd.empty_block) blocks->push_back(torch::nn::Identity());
  }
  Tensor run(size_t i, const Tensor& x) {
    if (blocks->ptr(i)->name().find("Identity") != std::string::npos) {
      return blocks->run(
          i, [](const Tensor& h) { return h * 2; }, x);
    }
    return blocks->run(i, &OddBlockImpl::forward, x);
  }
  Tensor all_blocks(Tensor x) {
    for (size_t i = 0; i < blocks->size(); ++i) x = run(i, x);
    return options.twice ? run(0, x) : x;
  }
  Tensor forward(const Tensor& in) {
    Tensor x = options.no_input_gradient ? in.clone() : entry(in);
    x = options.region ? recompute(
                             *blocks, [this](const Tensor& h) { return all_blocks(h); }, x)
                       : all_blocks(x);
    if (options.no_input_gradient) x = x + 0 * entry(in);
    return head(x);
  }
  OddOptions options;
  torch::nn::Linear entry{5, 5}, head{5, 5};
  Blocks blocks;
};
TORCH_MODULE(OddModel);

// Each once.
inline std::vector<Tensor> parameters_of(const torch::nn::Module& model) {
  std::vector<Tensor> distinct;
  for (const Tensor& parameter : model.parameters()) {
    const auto is_same = [&](const Tensor& other) { return other.is_same(parameter); };
    if (std::none_of(distinct.begin(), distinct.end(), is_same)) distinct.push_back(parameter);
  }
  return distinct;
}

}  // namespace pacer::testing
