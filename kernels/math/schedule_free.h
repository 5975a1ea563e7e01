// Schedule-Free AdamW (Defazio et al., arXiv:2405.15682) of one element, for CPU and GPU, and the scalars of a
// step. The parameter is y = (1 - beta1) z + beta1 x, at which gradients are taken; exp_avg holds z, which the
// steps move, and x is the average of all z. x is never stored: it is y + (1 - 1 / beta1) (z - y). No loops here,
// and nothing of what puts x into a model.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/adam.h>

namespace pacer::kernels {

// base^exponent for base >= 0 and exponent in [0, 64]: whole powers by repeated squaring, the fraction by square
// roots, bit by bit. Within 2^-44 of the result, and the same bits on host and device, which `pow` does not
// promise. 0^0 is 1.
PACER_HOST_DEVICE double power_of(double base, double exponent) {
  const auto whole = static_cast<int64_t>(exponent);
  double result = 1.0, factor = base;
  for (int64_t left = whole; left > 0; left >>= 1) {
    if (left & 1) result = mul_(result, factor);
    factor = mul_(factor, factor);
  }
  double root = base;
  for (double fraction = exponent - static_cast<double>(whole); fraction > 0;) {
    root = sqrt_(root);
    fraction = fraction + fraction;
    if (fraction >= 1) {
      result = mul_(result, root);
      fraction = fraction - 1;
    }
  }
  return result;
}

// The learning rate of step number `step`, 1 for the first.
PACER_HOST_DEVICE double warmed_up_rate(double learning_rate, const AveragingRule& rule, int64_t step) {
  if (step > rule.warmup_steps) return learning_rate;
  return mul_(learning_rate, div_(static_cast<double>(step), static_cast<double>(rule.warmup_steps)));
}

// Takes step number `step` into the average, and returns its share of it: 0 as long as all rates were 0.
PACER_HOST_DEVICE double take_into_average(double rate, const AveragingRule& rule, int64_t step,
                                           AverageWeights& average) {
  if (rate > average.lr_max) average.lr_max = rate;
  const double weight =
      mul_(power_of(static_cast<double>(step), rule.r), power_of(average.lr_max, rule.weight_lr_power));
  average.weight_sum = average.weight_sum + weight;
  return average.weight_sum == 0 ? 0.0 : div_(weight, average.weight_sum);
}

// The scalars of step number `step`, which `average` takes in. Computed in double, each rounded once. l2 is the
// decay at y, and step_size the learning rate of z; beta1 must be above 0.
template <class Real>
PACER_HOST_DEVICE AdamScalars<Real> schedule_free_scalars(const RuleSettings& settings, int64_t step,
                                                          AverageWeights& average) {
  const double rate = warmed_up_rate(settings.learning_rate, settings.averaging, step);
  const double share = take_into_average(rate, settings.averaging, step, average);
  AdamScalars<Real> scalars = adam_scalars<Real>(settings, step);
  scalars.l2 = static_cast<Real>(settings.weight_decay);
  scalars.decay = 0;
  scalars.step_size = static_cast<Real>(rate);
  scalars.average_weight = static_cast<Real>(share);
  scalars.y_step = static_cast<Real>(mul_(rate, mul_(settings.beta1, 1.0 - share) - 1.0));
  return scalars;
}

//   v = beta2 v + (1 - beta2) g^2          u = g / (sqrt(v) / sqrt(c2) + epsilon) + weight_decay y
//   y = y + c (z - y) + y_step u           z = z - lr u
//
// with c = average_weight and y_step = lr (beta1 (1 - c) - 1). In step 1 z is y, whatever exp_avg holds. Valid
// range: as adam_step.
struct ScheduleFreeRule {
  static constexpr bool kSecondMoment = true;
  static constexpr bool kMaxMoment = false;

  template <class Real>
  PACER_HOST_DEVICE static void step(AdamElement<Real>& e, const AdamScalars<Real>& s) {
    const Real g = mul_(s.factor, e.gradient);
    const Real z = s.step == 1 ? e.parameter : e.exp_avg;
    e.exp_avg_sq = fma_(s.beta2, e.exp_avg_sq, mul_(mul_(s.one_minus_beta2, g), g));
    const Real update = fma_(s.l2, e.parameter, over_root(g, e.exp_avg_sq, s));
    e.parameter = fma_(s.average_weight, z - e.parameter, e.parameter);
    e.parameter = fma_(s.y_step, update, e.parameter);
    e.exp_avg = fma_(-s.step_size, update, z);
  }
};

}  // namespace pacer::kernels
