// OneBitLamb: LAMB whose ranks exchange the signs of their momentum, one bit an element instead of 32 (Li et
// al., "1-bit LAMB", arXiv:2104.06069). For large batches on ranks joined by networks that are slow beside
// their GPUs or CPUs.
//
//   auto world = pacer::Communicator::from_environment();
//   pacer::OneBitLamb optimizer(model->named_parameters(),
//                               pacer::OneBitLambOptions(2e-3).freeze_step(2'000), world);
//   pacer::Session session(*model, optimizer, world);
//
// Two phases, as OneBitAdam. Warm-up: gradients are averaged over ranks in full precision and the step is
// that of FusedLamb, to the bit; each tensor's trust ratios are averaged. Then the variance freezes, momentum
// travels as signs, and a tensor's step is scaled by its mean ratio, times a factor that follows how much its
// variance would have changed since (kernels/math/onebit_lamb.h). Signs have one size for all tensors, so
// momentum is scaled to the same magnitude in each before it travels.
//
// What onebit_adam.h says of gradients that are missing or not finite, of clipping, parameters and GPUs holds
// here, too. The variance cannot be refreshed.
#pragma once

#include <pacer/optimizers/onebit_lamb_options.h>
#include <pacer/optimizers/onebit_optimizer.h>

namespace pacer {

class OneBitLamb : public OneBitOptimizerOf<OneBitLambOptions> {
 public:
  using OneBitOptimizerOf::OneBitOptimizerOf;

  // Each returns the value of one parameter and waits for a GPU. They throw InvalidArgument for a tensor that
  // is not one of the parameters. coefficient() is the mean of the parameter's trust ratios, before the
  // freeze of those so far; it is 1 where none were averaged.
  double coefficient(const torch::Tensor& parameter) const;
  // What the last compressed step multiplied that mean with; 1 before.
  double factor(const torch::Tensor& parameter) const;
  // The factor by which the parameter's momentum is multiplied before it travels. It is 1 before the freeze.
  double momentum_scale(const torch::Tensor& parameter) const;

 private:
  // Throws InvalidArgument where there is none.
  const torch::optim::OptimizerParamGroup& group_of(const torch::Tensor& parameter) const;
};

}  // namespace pacer
