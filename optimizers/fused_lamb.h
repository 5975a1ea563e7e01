// FusedLamb: LAMB (You et al., arXiv:1904.00962, algorithm 2) with two memory-bound kernels for all
// parameters, for training with large batches.
//
//   pacer::FusedLamb optimizer(model->parameters(), pacer::FusedLambOptions(2e-3).weight_decay(0.01));
//
//   m, v as Adam        u = m^ / (sqrt(v^) + eps) + weight_decay * p
//   r = clamp(|p| / |u|, min_coeff, max_coeff), 1 where |p| or |u| is 0         p -= lr * r * u
//
// Norms are those of each parameter tensor as a whole, of the fp32 value where a 16-bit parameter has one,
// added up in a fixed order: CPU and GPU agree to the bit. Everything else is as in fused_adam.h: parameters
// of any shape, stride and dtype, on one device; those without a gradient sit the step out; bad input throws
// InvalidArgument before anything is changed; on CUDA a step never synchronises and can be captured in a
// CUDA graph.
#pragma once

#include <pacer/optimizers/adam_param_state.h>
#include <pacer/optimizers/fused_optimizer.h>
#include <pacer/optimizers/lamb_options.h>
#include <pacer/optimizers/named_parameters.h>

namespace pacer {

class FusedLamb : public FusedOptimizerOf<FusedLambOptions> {
 public:
  using FusedOptimizerOf::FusedOptimizerOf;

  // r of the parameter's last applied step. 1 before its first one, and again until its next one where
  // parameters, their memory or their state were replaced. Waits for the device on a GPU. Throws
  // InvalidArgument for a tensor that is not one of the parameters.
  double trust_ratio(const torch::Tensor& parameter) const { return trust_ratio_of(parameter); }
};

}  // namespace pacer
