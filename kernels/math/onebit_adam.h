// 1-bit Adam after the freeze, one element at a time, written once for the host and the device (Tang et al.,
// arXiv:2102.02888, algorithm 1): the variance v stands still, and the momentum is what ranks exchange.
//
//   u = beta1 * m + (1 - beta1) * g                            this rank's own gradient, the shared momentum
//   m = mean over ranks of u, as signs and scales
//   p -= lr * weight_decay * p;   p -= (lr / c1) * m / (sqrt(max(v, floor)) + epsilon)
#pragma once

#include <pacer/kernels/math/adam.h>

namespace pacer::kernels {

PACER_HOST_DEVICE float onebit_momentum(float gradient, float momentum, const MomentScalars<float>& s) {
  return fma_(s.beta1, momentum, mul_(s.one_minus_beta1, mul_(s.factor, gradient)));
}

// The parameter after the step. `variance` is bias-corrected already; no element divides by less than its
// tensor's floor allows.
PACER_HOST_DEVICE float frozen_step(float parameter, float momentum, float variance, float floor,
                                    const AdamScalars<float>& s) {
  const float decayed = fma_(-s.decay, parameter, parameter);
  const float denominator = sqrt_(variance > floor ? variance : floor) + s.epsilon;
  return fma_(-s.step_size, div_often_zero(momentum, denominator), decayed);
}

// What a refresh, the K-th step after the last one, leaves of the variance: keep = beta2^K, take = 1 -
// beta2^K.
struct VarianceRefresh {
  float keep = 1;
  float take = 0;
};
PACER_HOST_DEVICE VarianceRefresh variance_refresh(double beta2, int64_t steps) {
  const double take = one_minus_power(beta2, steps);
  return {static_cast<float>(1.0 - take), static_cast<float>(take)};
}

PACER_HOST_DEVICE float refreshed_variance(float gradient, float variance, const MomentScalars<float>& s,
                                           const VarianceRefresh& refresh) {
  const float g = mul_(s.factor, gradient);
  return fma_(refresh.keep, variance, mul_(mul_(refresh.take, g), g));
}

}  // namespace pacer::kernels
