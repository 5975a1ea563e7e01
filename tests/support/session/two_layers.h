// A model of two layers and its batches, the same in every call, and an SGD that can be made to fail.
#pragma once

#include <stdexcept>
#include <utility>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

namespace pacer::testing {

// [N, 3] -> [N, 2].
inline torch::nn::Sequential two_layers() {
  torch::manual_seed(7);
  return torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::Linear(4, 2));
}

// [4, width].
inline torch::Tensor batch_of(int64_t step, int64_t width) {
  return torch::arange(4 * width, at::kFloat)
      .view({4, width})
      .mul(0.1)
      .sub(0.3)
      .add(0.05 * static_cast<double>(step));
}

// SGD whose step fails once where it is asked to, before it changes anything.
class FailingSgd : public torch::optim::SGD {
 public:
  using SGD::SGD;
  torch::Tensor step(LossClosure closure = nullptr) override {
    if (std::exchange(fails, false)) throw std::runtime_error("no memory is left");
    return SGD::step(closure);
  }
  bool fails = false;
};

}  // namespace pacer::testing
