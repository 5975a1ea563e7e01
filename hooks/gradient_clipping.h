// Clips the gradient to a global norm (Pascanu et al., arXiv:1211.5063, algorithm 1): all gradients times
// min(1, max_norm / norm). The norm is that of the averaged, unscaled gradient over all parameters of the
// optimizer, or over those of one of its parameter groups. Steps whose gradients are not finite are skipped.
//
//   session.use(pacer::GradientClipping(1.0));
//   session.use(pacer::GradientClipping({pacer::GradientClippingOptions(1.0).group(0),    // group 2 stays as it is
//                                        pacer::GradientClippingOptions(0.1).group(1)}));
//
// With pacer's optimizers the factor goes into the update itself, and nothing waits for the GPU. Other
// optimizers get clipped gradients, for which the host waits once a step. Norms of groups, and of another order
// than 2, cost one more read of the gradients that they are of.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/arg.h>

#include <pacer/hooks/hook.h>

namespace pacer {

class GradientGuard;

namespace detail {
class GroupClips;
}  // namespace detail

struct GradientClippingOptions {
  GradientClippingOptions(double max_norm) : max_norm_(max_norm) {}
  // What the norm is clipped to; finite, > 0.
  TORCH_ARG(double, max_norm);
  // The norm's order p > 0, as clip_grad_norm_ of torch::nn::utils has it: (sum of |x|^p)^(1/p) over all elements;
  // infinity: the largest |x|. A norm that is not finite, though gradients are, skips the step, too.
  TORCH_ARG(double, norm_type) = 2;
  // The optimizer's parameter group whose gradients are clipped, by their own norm, counted from 0; nothing: all
  // groups together.
  TORCH_ARG(std::optional<int64_t>, group);
  // In a compressed step of a 1-bit optimizer each rank clips each bucket by itself: by the norm that the
  // last step with finite gradients had, and to max_norm times the root of the number of ranks. So a bucket
  // need not wait for the others (overlap_backward), and the norm of a step of b buckets is clipped to
  // max_norm * sqrt(b + 1) or less. All other steps know the norm in time and are clipped exactly.
  TORCH_ARG(bool, by_previous_norm) = false;
};

class GradientClipping : public Hook {
 public:
  // Throws InvalidArgument for options out of range.
  explicit GradientClipping(GradientClippingOptions options)
      : GradientClipping(std::vector<GradientClippingOptions>{options}) {}
  // One for each group that is clipped; the others stay as they are.
  explicit GradientClipping(std::vector<GradientClippingOptions> options);

  std::string hook_name() const override { return "gradient_clipping"; }
  Slot slot() const override { return Slot::clip; }
  bool exclusive() const override { return true; }
  // Throws InvalidArgument for a group that the optimizer does not have, and norms of groups or of another order
  // with a 1-bit optimizer, whose gradients are not averaged, or a Pipeline, whose stages have groups of their own.
  void attach(SessionParts& parts) override;
  void arrange() override;
  std::string agreement() const override;
  void gradients_ready(const Progress& progress) override;
  // Where groups have norms of their own, or the order is not 2, the norms before clipping: clipped_norm, or
  // clipped_norm_0 for group 0.
  void after_step(StepReport& report) override;
  void save(NamedTensors& state) const override;
  void load(const NamedTensors& state) override;

 private:
  bool by_previous_norm() const { return options_.front().by_previous_norm(); }

  std::vector<GradientClippingOptions> options_;
  std::shared_ptr<GradientGuard> guard_;       // once attached
  std::shared_ptr<detail::GroupClips> clips_;  // null: the guard clips all gradients by their Euclidean norm
  SessionParts* parts_ = nullptr;              // once attached
};

}  // namespace pacer
