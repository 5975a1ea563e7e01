// 1-bit LAMB after the freeze, written once for the host and the device (Li et al., arXiv:2104.06069,
// algorithm 1). The variance v stands still; how far it would have moved is followed by v_fresh, which takes
// in gradients as the momentum shows them; and instead of a trust ratio of its own, a step of a tensor takes
// the mean ratio c of the warm-up, times a factor f that makes up for the variance:
//
//   g~ = (m - beta1 * m_before) / (1 - beta1)          v_fresh = beta2 * v_fresh + (1 - beta2) * g~^2
//   d  = sqrt(max(v, floor)) + epsilon                 u0 = (m / d) / c1      u = u0 + weight_decay * p
//   f  = max over the tensor of d / (sqrt(v_fresh / c2) + epsilon)
//   with weight decay: k = min(1, |u0| / |u|), f = f * k + (1 - k)
//   f between factor_min and factor_max, and within a share of the step before's
//   p -= learning_rate * c * f * u
//
// m / d is bounded as in 1-bit Adam. Momentum travels scaled, so that the signs of all tensors can have one
// size: `scale` times the momentum.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/lamb.h>
#include <pacer/kernels/math/onebit_adam.h>

namespace pacer::kernels {

struct LambFactorBounds {
  double min = 0;
  double max = 0;
  double threshold = 0;  // the share by which it may change
};
inline bool operator==(const LambFactorBounds& a, const LambFactorBounds& b) {
  return a.min == b.min && a.max == b.max && a.threshold == b.threshold;
}

// (1 - beta2) * g~^2: the same for both signs of all its arguments.
PACER_HOST_DEVICE float fresh_share(float momentum, float before, const MomentScalars<float>& s) {
  const float gradient = div_(fma_(-s.beta1, before, momentum), s.one_minus_beta1);
  return mul_(mul_(s.one_minus_beta2, gradient), gradient);
}
PACER_HOST_DEVICE float fresh_variance(float variance, float share, const MomentScalars<float>& s) {
  return fma_(s.beta2, variance, share);
}

// u0, from frozen_direction, and from it u.
PACER_HOST_DEVICE float lamb_direction(float direction, const LambScalars<float>& s) {
  return mul_(s.inverse_correction, direction);
}
PACER_HOST_DEVICE float lamb_update(float direction, float parameter, const LambScalars<float>& s) {
  return fma_(s.weight_decay, parameter, direction);
}

// The frozen denominator divided by the one that moves; NaN where both are 0.
PACER_HOST_DEVICE float denominator_ratio(float denominator, float fresh, const LambScalars<float>& s) {
  return div_(denominator, fma_(sqrt_(fresh), s.inverse_sqrt_correction, s.epsilon));
}

PACER_HOST_DEVICE double clamp_(double value, double low, double high) {
  return value < low ? low : value > high ? high : value;
}

// f, from the largest denominator_ratio of a tensor and the sums of squares of its u0 and u.
PACER_HOST_DEVICE double lamb_factor(double largest, double direction_squares, double update_squares,
                                     double before, const LambFactorBounds& bounds,
                                     const LambScalars<float>& s) {
  if (s.adapt == 0) return 1;
  constexpr double kLargestFloat = 3.4028234663852886e38;  // infinity times a share of 0 would be no number
  double factor = largest < kLargestFloat ? largest : kLargestFloat;
  if (s.weight_decay > 0 && update_squares > 0) {
    const double share = div_(sqrt_(direction_squares), sqrt_(update_squares));
    const double kept = share < 1 ? share : 1;
    factor = mul_(factor, kept) + (1.0 - kept);
  }
  factor = clamp_(factor, bounds.min, bounds.max);
  return clamp_(factor, mul_(1.0 - bounds.threshold, before), mul_(1.0 + bounds.threshold, before));
}

PACER_HOST_DEVICE float lamb_step_size(double coefficient, double factor, const LambScalars<float>& s) {
  const double scaled = s.adapt == 0 ? s.learning_rate : mul_(mul_(s.learning_rate, coefficient), factor);
  return static_cast<float>(scaled);
}

// How a tensor's momentum is scaled before it travels: to the mean magnitude of all tensors' momentum.
PACER_HOST_DEVICE float momentum_scale(double magnitude, double mean) {
  constexpr double kMost = 1024;
  return magnitude > 0 ? static_cast<float>(clamp_(div_(mean, magnitude), 1 / kMost, kMost)) : 1.0f;
}

}  // namespace pacer::kernels
