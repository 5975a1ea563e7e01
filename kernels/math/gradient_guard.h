// The guard of an optimizer step, written once for the host and the device: from the sum of squares of all
// stored gradients to the norm, the finite flag, the clip factor and the next loss scale. Sums themselves
// live in kernels/norm.h.
#pragma once

#include <cstdint>

#include <pacer/kernels/gradient_check.h>
#include <pacer/kernels/math/arithmetic.h>

namespace pacer::kernels {

// A dynamic loss scale stays in this range, so that it can neither vanish nor overflow.
constexpr float kSmallestLossScale = 1.0f / 16384;
constexpr float kLargestLossScale = 3e38f;

PACER_HOST_DEVICE double clip_factor(double norm, double max_norm) {
  return max_norm > 0 && norm > max_norm ? div_(max_norm, norm) : 1.0;
}

// Squares cannot cancel, so anything that is not finite among the gradients shows in their sum.
PACER_HOST_DEVICE void guard_step(double sum_of_squares, const GuardRule& rule, GradientCheck& check) {
  const double unscale = div_(1.0, static_cast<double>(check.loss_scale));
  const double largest = 1.7976931348623157e308;
  check.sum_of_squares = sum_of_squares;
  check.norm = mul_(mul_(sqrt_(sum_of_squares), unscale), rule.average);
  const double clip = clip_factor(check.norm, rule.max_norm);
  check.factor = mul_(mul_(unscale, clip), rule.average);
  check.non_finite = !(sum_of_squares <= largest);
  if (check.non_finite == 0) check.last_norm = check.norm;
  check.skipped_steps += check.non_finite;
  check.finite_steps = check.non_finite ? 0 : check.finite_steps + 1;
  if (rule.growth_interval == 0) return;
  float next = check.loss_scale;
  if (check.non_finite) next = mul_(next, rule.backoff_factor);
  if (check.finite_steps == rule.growth_interval) {
    next = mul_(next, rule.growth_factor);
    check.finite_steps = 0;
  }
  check.loss_scale = next < kSmallestLossScale  ? kSmallestLossScale
                     : next > kLargestLossScale ? kLargestLossScale
                                                : next;
}

// What a part of the gradients is multiplied with that is used before all of them are known: it is clipped by
// the norm of the step before, and by its own, of which it may have max_norm * sqrt(workers). The sum is that
// of one of `workers`, whose stored gradients times average times local_weight are its mean. `check` is the
// one from before the step's look.
PACER_HOST_DEVICE double early_factor(double sum_of_squares, double local_weight, double workers,
                                      const GuardRule& rule, const GradientCheck& check) {
  const double unscale = div_(1.0, static_cast<double>(check.loss_scale));
  const double norm = mul_(mul_(mul_(sqrt_(sum_of_squares), unscale), rule.average), local_weight);
  const double by_last = clip_factor(check.last_norm, rule.max_norm);
  const double by_own = clip_factor(norm, mul_(rule.max_norm, sqrt_(workers)));
  const double clip = by_own < by_last ? by_own : by_last;
  return mul_(local_weight, mul_(mul_(unscale, clip), rule.average));
}

}  // namespace pacer::kernels
