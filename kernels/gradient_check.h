// What the guard of an optimizer step is told and what it leaves behind, for those who ask it or keep its
// memory. Its arithmetic is in kernels/math/gradient_guard.h.
#pragma once

#include <cstdint>

namespace pacer::kernels {

// What the user chose, as the host knows it.
struct GuardRule {
  double average = 1;           // times this, the stored gradients (a sum over micro-batches) are their mean
  double max_norm = 0;          // clip to this norm; 0 for no clipping
  float growth_factor = 2;      // of the loss scale, after growth_interval finite steps in a row
  float backoff_factor = 0.5f;  // of the loss scale, after a step that was not finite
  int64_t growth_interval = 0;  // 0: the loss scale is fixed
};

// What one look at all gradients leaves behind, in host or device memory. A fresh one is GradientCheck{}.
struct GradientCheck {
  double sum_of_squares = 0;  // of the stored gradients
  double norm = 0;            // of the gradient itself: unscaled, averaged, before clipping
  double factor = 1;          // inv_loss_scale * clip * average: what the optimizer multiplies gradients with
  uint32_t non_finite = 0;    // 1 if the sum is not finite: the step must change nothing
  float loss_scale = 1;       // of the coming backward passes
  int64_t skipped_steps = 0;  // how many looks were non-finite so far
  int64_t finite_steps = 0;   // in a row since the loss scale last changed
  double last_norm = 0;       // that of the last look that was finite; 0 before the first
};

}  // namespace pacer::kernels
