// 1-bit LAMB (Li et al., arXiv:2104.06069) as a textbook has it. No clipping, no check of gradients.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <pacer/optimizers/onebit_lamb_options.h>

#include "textbook.h"

namespace scales {

class TextbookOneBitLamb : public torch::optim::Optimizer {
 public:
  // Every parameter must have a gradient at each step. Groups have OneBitLambOptions, of which all numbers
  // and adapt count; bias correction is always on. Betas, freeze_step and variance_floor are those of
  // `defaults`.
  TextbookOneBitLamb(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                     const pacer::OneBitLambOptions& defaults,
                     const std::shared_ptr<pacer::Communicator>& world, ScaleUnit unit);

  at::Tensor step(LossClosure closure = nullptr) override;

 private:
  struct Tensor {  // what the rule knows of each parameter
    const pacer::OneBitLambOptions* options;
    double coefficient = 0;  // mean of the trust ratios
    int64_t ratios = 0;      // that are in it
    double scale = 1;        // of the momentum while it travels
    double factor = 1;       // times the coefficient, in the last step
  };

  void warm_up_step(const at::Tensor& gradient);
  void compressed_step(const at::Tensor& gradient);
  void freeze();

  const Tensors parameters_of_all_;
  const pacer::OneBitLambOptions rule_;
  OneBitMean mean_;
  std::vector<Tensor> tensors_;
  int64_t steps_ = 0;
  at::Tensor momentum_, variance_;  // float (elements)
  // The same; undefined in warm-up. The fresh variance follows what the momentum says of gradients.
  at::Tensor denominator_, fresh_variance_;
};

}  // namespace scales
