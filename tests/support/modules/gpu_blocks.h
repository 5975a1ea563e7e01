// What the tests of recomputation on a GPU train: MLP blocks with dropout, alone and in a stack.
#pragma once

#include <cstdint>

#include <ATen/ops/gelu.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <pacer/device/detail/random_state.h>
#include <pacer/modules/blocks.h>
#include <pacer/modules/recompute.h>

namespace pacer::testing::gpu_blocks {

using torch::Tensor;

inline const at::Device kGpu("cuda:0");
constexpr int64_t kSize = 64, kDepth = 4;

inline Tensor gpu_random_state() { return detail::get_random_state(kGpu).cuda; }

// A pre-norm MLP block with dropout, whose middle may be a region of its own.
struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(int64_t size = kSize, bool has_region = false)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({size})))),
        up(register_module("up", torch::nn::Linear(size, 4 * size))),
        down(register_module("down", torch::nn::Linear(4 * size, size))),
        drop(register_module("drop", torch::nn::Dropout(0.1))),
        has_region(has_region) {}
  Tensor middle(const Tensor& x) { return drop(down(at::gelu(up(x)))); }
  Tensor forward(const Tensor& x) {
    ++runs;
    const Tensor y = norm(x);
    return x + (has_region ? recompute(*this, &MlpImpl::middle, y) : middle(y));
  }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
  torch::nn::Dropout drop;
  bool has_region;
  int64_t runs = 0;
};
TORCH_MODULE(Mlp);

struct StackImpl : torch::nn::Module {
  explicit StackImpl(int64_t depth = kDepth, int64_t size = kSize, bool has_regions = false) {
    torch::manual_seed(4);
    register_module("blocks", blocks);
    for (int64_t i = 0; i < depth; ++i) blocks->push_back(Mlp(size, has_regions));
  }
  Tensor forward(Tensor x) {
    for (size_t i = 0; i < blocks->size(); ++i) x = blocks->run(i, &MlpImpl::forward, x);
    return x;
  }
  int64_t runs(size_t i) { return blocks->at<MlpImpl>(i).runs; }

  Blocks blocks;
};
TORCH_MODULE(Stack);

}  // namespace pacer::testing::gpu_blocks
