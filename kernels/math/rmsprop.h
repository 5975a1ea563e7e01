// The element math of RMSprop (T. Tieleman, G. Hinton, 2012; centered: A. Graves, arXiv:1308.0850, equations 38 to 45), as
// torch::optim::RMSprop has it, operation by operation: where torch adds a product with one rounding, so does this.
#pragma once

#include <pacer/kernels/math/adam.h>

namespace pacer::kernels {

// A rule (adam.h). Its exp_avg is the mean of squares v, exp_avg_sq the momentum buffer m, and max_exp_avg_sq the mean of
// gradients a of the centered form. The scalars' beta1 is the momentum, beta2 is alpha; a factor below 0 maximizes.
//   g += weight_decay * p
//   v = alpha * v + (1 - alpha) * g^2            a = alpha * a + (1 - alpha) * g
//   d = sqrt(v) + epsilon, or sqrt(v - a^2) + epsilon where it is centered
//   p -= learning_rate * g / d, or with a momentum m = momentum * m + g / d and p -= learning_rate * m
// Rounding may bring v - a^2 below 0, which counts as 0; torch has NaN there.
// Bytes moved per parameter in fp32: 20, and 8 more each with a momentum and where it is centered.
template <bool kHasMomentum, bool kIsCentered>
struct RmspropRule {
  static constexpr bool kSecondMoment = kHasMomentum;
  static constexpr bool kMaxMoment = kIsCentered;

  template <class Real>
  PACER_HOST_DEVICE static void step(AdamElement<Real>& e, const AdamScalars<Real>& s) {
    Real g = mul_(s.factor, e.gradient);
    if (s.decay_mode == WeightDecay::l2) g = fma_(s.l2, e.parameter, g);
    e.exp_avg = fma_(mul_(s.one_minus_beta2, g), g, mul_(s.beta2, e.exp_avg));
    Real variance = e.exp_avg;
    if constexpr (kIsCentered) {
      e.max_exp_avg_sq = fma_(s.one_minus_beta2, g, mul_(s.beta2, e.max_exp_avg_sq));
      variance = fma_(-e.max_exp_avg_sq, e.max_exp_avg_sq, variance);
      variance = variance < 0 ? Real(0) : variance;
    }
    const Real denominator = sqrt_of_often_zero(variance) + s.epsilon;
    if constexpr (kHasMomentum) {
      e.exp_avg_sq = mul_(s.beta1, e.exp_avg_sq) + div_often_zero(g, denominator);
      e.parameter = fma_(-s.step_size, e.exp_avg_sq, e.parameter);
    } else {
      e.parameter = e.parameter + div_often_zero(mul_(-s.step_size, g), denominator);
    }
  }
};

}  // namespace pacer::kernels
