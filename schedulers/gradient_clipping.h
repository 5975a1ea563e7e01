// Clips the gradient to a global norm (Pascanu et al., arXiv:1211.5063, algorithm 1): all gradients times
// min(1, max_norm / norm). The norm is that of the averaged, unscaled gradient over all parameters of the
// optimizer. Steps whose gradients are not finite are skipped.
//
// With pacer's optimizers the factor goes into the update itself, and nothing waits for the GPU. Other
// optimizers get clipped gradients, for which the host waits once a step.
#pragma once

#include <string>

#include <pacer/schedulers/hook.h>

namespace pacer {

class GradientClipping : public Hook {
 public:
  // max_norm: finite, > 0.
  explicit GradientClipping(double max_norm);

  std::string hook_name() const override { return "gradient_clipping"; }
  Slot slot() const override { return Slot::clip; }
  bool exclusive() const override { return true; }
  void attach(SessionParts& parts) override;
  std::string agreement() const override;

 private:
  double max_norm_;
};

}  // namespace pacer
