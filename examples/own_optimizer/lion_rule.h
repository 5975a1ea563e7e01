// Lion (Chen et al., arXiv:2302.06675, algorithm 2) of one element, for CPU and GPU:
//
//   p -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * p)       m = beta2 * m + (1 - beta2) * g
//
// `factor` is what the average over micro-batches, the loss scale and clipping make of a gradient.
#pragma once

#include <pacer/kernels/math/adam.h>

struct LionRule {
  static constexpr bool kSecondMoment = false;
  static constexpr bool kMaxMoment = false;

  template <class Real>
  PACER_HOST_DEVICE static void step(pacer::kernels::AdamElement<Real>& e,
                                     const pacer::kernels::AdamScalars<Real>& s) {
    using pacer::kernels::fma_, pacer::kernels::mul_;
    const Real g = mul_(s.factor, e.gradient);
    const Real direction = fma_(s.beta1, e.exp_avg, mul_(s.one_minus_beta1, g));
    const Real sign = direction > 0 ? Real(1) : direction < 0 ? Real(-1) : direction;  // NaN stays NaN
    e.parameter = fma_(-s.decay, e.parameter, e.parameter);
    e.parameter = fma_(-s.step_size, sign, e.parameter);
    e.exp_avg = fma_(s.beta2, e.exp_avg, mul_(s.one_minus_beta2, g));
  }
};
