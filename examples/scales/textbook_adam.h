// 1-bit Adam (Tang et al., arXiv:2102.02888) as a textbook has it. No clipping, one group of options, no
// check of gradients.
#pragma once

#include <cstdint>
#include <memory>

#include <pacer/optimizers/onebit_adam_options.h>

#include "textbook.h"

namespace scales {

class TextbookOneBitAdam : public torch::optim::Optimizer {
 public:
  // Every parameter must have a gradient at each step. Of the options lr, betas, eps, weight_decay,
  // freeze_step and variance_floor count.
  TextbookOneBitAdam(const Tensors& parameters, const pacer::OneBitAdamOptions& options,
                     const std::shared_ptr<pacer::Communicator>& world, ScaleUnit unit);

  at::Tensor step(LossClosure closure = nullptr) override;

 private:
  const pacer::OneBitAdamOptions& options() const;
  void freeze();
  void move_parameters(const at::Tensor& update);

  OneBitMean mean_;
  int64_t steps_ = 0;
  at::Tensor momentum_, variance_;  // float (elements)
  at::Tensor denominator_;          // the same; undefined in warm-up
};

}  // namespace scales
