// The backward pass in two halves on a GPU, where the engine runs it on a thread of its own: gradients of the
// whole pass to the bit.
#include "support/catch.h"

#include <memory>
#include <vector>

#include <torch/autograd.h>

#include <pacer/modules/split_backward.h>

#include "support/both_devices.h"
#include "support/modules/autocast.h"
#include "support/parallel/stages.h"

namespace pacer::testing::stages {

TEST_CASE("on a GPU, both halves of backward give what the whole gives, to the bit", "[gpu][split]") {
  PACER_NEEDS_GPU();
  const at::Device gpu("cuda:0");
  for (const bool autocast : {false, true}) {
    CAPTURE(autocast);
    torch::manual_seed(3);
    const Stage stage = three_blocks(0.1);
    stage.module->to(gpu);
    const auto run = [&](bool in_halves) {
      stage.module->zero_grad();
      torch::manual_seed(7);
      std::vector<Tensor> gradients;
      std::vector<SplitBackward> waiting;
      for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
        const Tensor x = torch::randn({kBatch, kLength, kSize}, gpu).requires_grad_();
        Tensor y;
        {
          const auto cast = autocast ? std::make_unique<Autocast>(at::kCUDA) : nullptr;
          y = stage.forward({x})[0];
        }
        const Tensor dy = torch::randn_like(y.detach());
        if (in_halves) {
          waiting.emplace_back(Tensors{y}, Tensors{x});
          gradients.push_back(waiting.back().input_half({dy})[0]);
        } else {
          y.backward(dy);
          gradients.push_back(x.grad());
        }
      }
      for (SplitBackward& backward : waiting) backward.weight_half();
      for (const Tensor& parameter : stage.module->parameters())
        gradients.push_back(parameter.grad().clone());
      return gradients;
    };
    require_same(run(false), run(true));
  }
}

}  // namespace pacer::testing::stages
