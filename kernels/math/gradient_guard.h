// The guard of an optimizer step, written once for the host and the device: from the sum of squares of all
// stored gradients to the norm, the finite flag, the clip factor and the next loss scale. Sums themselves
// live in kernels/norm.h.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/arithmetic.h>

namespace pacer::kernels {

// What the user chose, as the host knows it.
struct GuardRule {
  double average = 1;           // times this, the stored gradients (a sum over micro-batches) are their mean
  double max_norm = 0;          // clip to this norm; 0 for no clipping
  float growth_factor = 2;      // of the loss scale, after growth_interval finite steps in a row
  float backoff_factor = 0.5f;  // of the loss scale, after a step that was not finite
  int64_t growth_interval = 0;  // 0: the loss scale is fixed
};

// A dynamic loss scale stays in this range, so that it can neither vanish nor overflow.
constexpr float kSmallestLossScale = 1.0f / 16384;
constexpr float kLargestLossScale = 3e38f;

// What one look at all gradients leaves behind, in host or device memory. A fresh one is GradientCheck{}.
struct GradientCheck {
  double sum_of_squares = 0;  // of the stored gradients
  double norm = 0;            // of the gradient itself: unscaled, averaged, before clipping
  double factor = 1;          // inv_loss_scale * clip * average: what the optimizer multiplies gradients with
  uint32_t non_finite = 0;    // 1 if the sum is not finite: the step must change nothing
  float loss_scale = 1;       // of the coming backward passes
  int64_t skipped_steps = 0;  // how many looks were non-finite so far
  int64_t finite_steps = 0;   // in a row since the loss scale last changed
};

// Squares cannot cancel, so anything that is not finite among the gradients shows in their sum.
PACER_HOST_DEVICE void guard_step(double sum_of_squares, const GuardRule& rule, GradientCheck& check) {
  const double unscale = div_(1.0, static_cast<double>(check.loss_scale));
  const double largest = 1.7976931348623157e308;
  check.sum_of_squares = sum_of_squares;
  check.norm = mul_(mul_(sqrt_(sum_of_squares), unscale), rule.average);
  const bool clips = rule.max_norm > 0 && check.norm > rule.max_norm;
  const double clip = clips ? div_(rule.max_norm, check.norm) : 1.0;
  check.factor = mul_(mul_(unscale, clip), rule.average);
  check.non_finite = !(sum_of_squares <= largest);
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

}  // namespace pacer::kernels
