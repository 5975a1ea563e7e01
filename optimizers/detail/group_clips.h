// Clipping of gradients by norms that are not the Euclidean one of all of them: by another order, or of each
// parameter group by itself. The factors go into the optimizer's update, as the guard's own does.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include <pacer/collectives/parameter_range.h>
#include <pacer/optimizers/gradient_guard.h>

namespace pacer::detail {

struct GradientClip {
  double max_norm;              // finite, > 0
  double norm_type = 2;         // the norm's order, > 0; infinity for the largest magnitude
  std::optional<size_t> group;  // of the optimizer; nothing: all gradients together
};

// Throws InvalidArgument, which begins with `who`, for a number that cannot be or, of an optimizer with so many
// groups, a group that is not there.
void check_clip(const std::string& who, const GradientClip& clip, size_t groups);

class GroupClips {
 public:
  // No group twice; all together only alone.
  explicit GroupClips(std::vector<GradientClip> clips) : clips_(std::move(clips)) {}

  const std::vector<GradientClip>& clips() const { return clips_; }
  // Gives the guard the factors of a step whose gradients are there: min(1, max_norm / norm) for each group that is
  // clipped, 1 for the others, and NaN where a norm is not finite. The mean gradient is `average` times what is stored,
  // without the guard's loss scale. `parts`, `ranks`: see ShardedState::gradient_parts. Throws InvalidArgument for a
  // gradient that is not dense.
  void measure(const std::vector<torch::optim::OptimizerParamGroup>& groups, GradientGuard& guard,
               double average, const ParameterRanges& parts = {}, Communicator* ranks = nullptr);
  // The norm of each clip in that step, before clipping: fp64, no dimensions, on the guard's device. Empty before
  // the first step.
  const std::vector<at::Tensor>& norms() const { return norms_; }

 private:
  std::vector<GradientClip> clips_;
  at::Tensor factors_;  // fp64 [groups]
  std::vector<at::Tensor> norms_;
};

}  // namespace pacer::detail
