// 1-bit Adam after the freeze, one element at a time, written once for the host and the device (Tang et al.,
// arXiv:2102.02888, algorithm 1): the variance v stands still, and the momentum is what ranks exchange.
//
//   u = beta1 * m + (1 - beta1) * g                            this rank's own gradient, the shared momentum
//   m = mean over ranks of u, as signs and scales
//   p -= lr * weight_decay * p;   p -= (lr / c1) * m / (sqrt(max(v, floor)) + epsilon)
//
// A sign stands for the magnitude of many elements, and where that of one element is far smaller, m is noise
// many times its root of v. So m / (...) is held to what Adam could reach at all, and an element that never
// had a gradient (v = 0) does not follow signs.
#pragma once

#include <pacer/kernels/math/adam.h>

namespace pacer::kernels {

PACER_HOST_DEVICE float onebit_momentum(float gradient, float momentum, const MomentScalars<float>& s) {
  return fma_(s.beta1, momentum, mul_(s.one_minus_beta1, mul_(s.factor, gradient)));
}

// Adam's |m| / sqrt(v) is never more than this, whatever the gradients are: by the inequality of Cauchy and
// Schwarz, with moments as they are, and the more so with a v that is corrected. Where beta1^2 is not below
// beta2 there is no such number, and what a single gradient may reach without beta1 takes its place.
inline float largest_direction(double beta1, double beta2) {
  const double of_one = 1 / sqrt_(1 - beta2), rest = 1 - beta1 * beta1 / beta2;
  const double of_all = rest > 0 ? (1 - beta1) * of_one / sqrt_(rest) : of_one;
  return static_cast<float>(of_all < of_one ? of_all : of_one);
}

// What the frozen variance of a tensor's elements is used with.
struct FrozenBounds {
  float floor;    // no element divides by less than its root
  float largest;  // of the magnitude of m / d, > 0
  bool holds;     // elements without variance where they are
};

// Elements without variance follow a momentum that is no signs', and has kept nothing of theirs; and any,
// where no element of the tensor has variance: then `floor` is negative, -0 included.
PACER_HOST_DEVICE FrozenBounds frozen_bounds(float floor, float largest, bool is_from_signs) {
  const bool has_variance = bits_of(floor) >> 31 == 0;
  return {has_variance ? floor : -floor, largest, is_from_signs && has_variance};
}

// d. `variance` is bias-corrected already.
PACER_HOST_DEVICE float frozen_denominator(float variance, const FrozenBounds& bounds, float epsilon) {
  return sqrt_(variance > bounds.floor ? variance : bounds.floor) + epsilon;
}

// The value, or the bound that it is beyond. NaN stays NaN.
PACER_HOST_DEVICE float within(float value, float largest) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  // Two instructions instead of four, which are registers of the kernels here.
  asm("min.NaN.f32 %0, %0, %1;\n\tmax.NaN.f32 %0, %0, %2;" : "+f"(value) : "f"(largest), "f"(-largest));
  return value;
#else
  const float least = -largest;
  return value > largest ? largest : value < least ? least : value;
#endif
}

// m / d, within bounds.
PACER_HOST_DEVICE float frozen_direction(float momentum, float variance, float denominator,
                                         const FrozenBounds& bounds) {
  const float direction = within(div_often_zero(momentum, denominator), bounds.largest);
  return bounds.holds && variance == 0 ? 0.0f : direction;
}

// The parameter after the step.
PACER_HOST_DEVICE float frozen_step(float parameter, float momentum, float variance,
                                    const FrozenBounds& bounds, const AdamScalars<float>& s) {
  const float decayed = fma_(-s.decay, parameter, parameter);
  const float denominator = frozen_denominator(variance, bounds, s.epsilon);
  return fma_(-s.step_size, frozen_direction(momentum, variance, denominator, bounds), decayed);
}

// What a refresh, the K-th step after the last one, leaves of the variance:
// keep = beta2^K, take = 1 - beta2^K.
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
