// Clips the gradient to a global norm (Pascanu et al., arXiv:1211.5063, algorithm 1): all gradients times
// min(1, max_norm / norm). The norm is that of the averaged, unscaled gradient over all parameters of the
// optimizer. Steps whose gradients are not finite are skipped.
//
// With pacer's optimizers the factor goes into the update itself, and nothing waits for the GPU. Other
// optimizers get clipped gradients, for which the host waits once a step.
#pragma once

#include <memory>
#include <string>

#include <torch/arg.h>

#include <pacer/hooks/hook.h>

namespace pacer {

class GradientGuard;

struct GradientClippingOptions {
  GradientClippingOptions(double max_norm) : max_norm_(max_norm) {}
  // What the norm is clipped to; finite, > 0.
  TORCH_ARG(double, max_norm);
  // In a compressed step of a 1-bit optimizer each rank clips each bucket by itself: by the norm that the
  // last step with finite gradients had, and to max_norm times the root of the number of ranks. So a bucket
  // need not wait for the others (overlap_backward), and the norm of a step of b buckets is clipped to
  // max_norm * sqrt(b + 1) or less. All other steps know the norm in time and are clipped exactly.
  TORCH_ARG(bool, by_previous_norm) = false;
};

class GradientClipping : public Hook {
 public:
  // Throws InvalidArgument for options out of range.
  explicit GradientClipping(GradientClippingOptions options);

  std::string hook_name() const override { return "gradient_clipping"; }
  Slot slot() const override { return Slot::clip; }
  bool exclusive() const override { return true; }
  void attach(SessionParts& parts) override;
  std::string agreement() const override;
  void save(NamedTensors& state) const override;
  void load(const NamedTensors& state) override;

 private:
  GradientClippingOptions options_;
  std::shared_ptr<GradientGuard> guard_;  // once attached
};

}  // namespace pacer
