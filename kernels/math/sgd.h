// The element math of SGD with momentum (Sutskever et al., 2013), as torch::optim::SGD has it, operation by operation:
// where torch adds a product it does so with one rounding, and so does this.
#pragma once

#include <pacer/kernels/math/adam.h>

namespace pacer::kernels {

// Whether a group has a momentum, and whether a step looks ahead along it.
enum class SgdMomentum { none, plain, nesterov };

// A rule (adam.h). The scalars' beta1 is the momentum, beta2 the dampening; a factor below 0 maximizes.
//   g += weight_decay * p
//   m = g in the first step, then momentum * m + (1 - dampening) * g
//   p -= learning_rate * m, or learning_rate * (g + momentum * m) with Nesterov's momentum, or learning_rate * g without one
// Bytes moved per parameter in fp32: 20, or 12 without a momentum.
template <SgdMomentum kMomentum>
struct SgdRule {
  static constexpr bool kFirstMoment = kMomentum != SgdMomentum::none;
  static constexpr bool kSecondMoment = false;
  static constexpr bool kMaxMoment = false;

  template <class Real>
  PACER_HOST_DEVICE static void step(AdamElement<Real>& e, const AdamScalars<Real>& s) {
    Real g = mul_(s.factor, e.gradient);
    if (s.decay_mode == WeightDecay::l2) g = fma_(s.l2, e.parameter, g);
    Real direction = g;
    if constexpr (kFirstMoment) {
      e.exp_avg = s.step == 1 ? g : fma_(s.one_minus_beta2, g, mul_(s.beta1, e.exp_avg));
      direction = kMomentum == SgdMomentum::nesterov ? fma_(s.beta1, e.exp_avg, g) : e.exp_avg;
    }
    e.parameter = fma_(-s.step_size, direction, e.parameter);
  }
};

}  // namespace pacer::kernels
