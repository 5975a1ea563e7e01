// The guard between gradients and an optimizer step: gradient norm, clipping, loss scale and the skipping of
// steps whose gradients are not finite. Everything is decided where the gradients live: on a GPU nothing
// waits for the device, unless a value is read.
//
// The guard holds rule and memory; who owns the gradients adds up their squares (kernels/norm.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>

#include <pacer/kernels/gradient_check.h>

namespace pacer {

class Communicator;

// How a dynamic loss scale moves (Micikevicius et al., arXiv:1710.03740, section 3.2).
struct LossScaleRule {
  double initial = 65536;
  double growth_factor = 2;     // after growth_interval finite steps in a row
  double backoff_factor = 0.5;  // after a step whose gradients were not finite
  int64_t growth_interval = 2000;
};

class GradientGuard {
 public:
  // Memory on the CPU or on one CUDA device.
  explicit GradientGuard(at::Device device);

  // From now on gradients are scaled so that their norm is at most max_norm (> 0). `by_previous`: those that
  // are used part by part may be clipped by the norm of the step before, with early_factor().
  void clip_to(double max_norm, bool by_previous = false);
  bool clips_by_previous() const { return clips_by_previous_; }
  // From now on gradients of parameter group g are multiplied with factors[g], too; those of groups behind its end
  // are not. `factors`: fp64 [groups] on the device, held and not copied; one that is not finite makes the look
  // find gradients that are not. Undefined: none any more.
  void multiply_groups(at::Tensor factors) { group_factors_ = std::move(factors); }
  const at::Tensor& group_factors() const { return group_factors_; }
  // Where that factor lies; null where the group has none.
  const double* group_factor(size_t group) const;
  // From now on gradients are those of loss_scale() * loss.
  void scale_loss(const LossScaleRule& rule);

  at::Device device() const { return memory_.device(); }
  // fp32, no dimensions, on the device; shares the guard's memory.
  at::Tensor loss_scale() const;
  // fp64, no dimensions, on the device; shares the guard's memory. What gradients must be multiplied with.
  at::Tensor factor() const;

  // The mean of the coming gradients is `average` times what is stored. Enqueued, where it changed; not to be
  // captured.
  void set_average(double average);
  // From now on the norm is that of the gradients of all these ranks, each of which looks at its own, in
  // every step.
  void look_with(std::shared_ptr<Communicator> ranks) { ranks_ = std::move(ranks); }
  // One look: `partials` are `count` sums of squares (double, on the device) of the stored gradients.
  void look(const double* partials, int64_t count);
  // Before the look of a step: *factor (on the device) = what kernels::early_factor says of a part, from the
  // sum of squares of its stored gradients (double, on the device).
  void early_factor(const double* sum_of_squares, double local_weight, double workers, double* factor) const;
  // It is on the CPU or on the device, as the guard is.
  kernels::GradientCheck* check() { return static_cast<kernels::GradientCheck*>(memory_.mutable_data_ptr()); }
  // A copy on the host; waits for a GPU.
  kernels::GradientCheck read() const;
  // The bytes of one GradientCheck on the device, for those who read late.
  const at::Tensor& memory() const { return memory_; }
  // Continues from the values of a former run.
  void write(const kernels::GradientCheck& check);

 private:
  at::Tensor sums_of_ranks(const double* partials, int64_t count) const;
  at::Tensor sums_with_factors(const double* partials, int64_t count) const;

  at::Tensor memory_;
  std::shared_ptr<Communicator> ranks_;  // null: this one only
  kernels::GuardRule rule_;
  at::Tensor device_rule_;    // its bytes on a GPU, else undefined
  at::Tensor group_factors_;  // undefined: groups have none
  bool rule_changed_ = true;
  bool clips_by_previous_ = false;
};

}  // namespace pacer
