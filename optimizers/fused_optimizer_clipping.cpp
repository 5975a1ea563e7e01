// Gradients that are clipped by their norm without a Session.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/group_clips.h>
#include <pacer/optimizers/detail/optimizer_traits.h>
#include <pacer/optimizers/fused_optimizer.h>
#include <pacer/optimizers/gradient_guard.h>

namespace pacer {
namespace {

std::vector<detail::GradientClip> clips_of(const std::shared_ptr<detail::GroupClips>& clips) {
  return clips ? clips->clips() : std::vector<detail::GradientClip>();
}

void check_local_clip(const std::string& who, const detail::GradientClip& clip, size_t groups,
                      bool has_own_ranks) {
  require(std::isfinite(clip.max_norm) && clip.max_norm >= 0, who,
          " needs a finite norm, or 0 for none, not ", clip.max_norm);
  // 0 ends the clipping of a group, which must be there, too.
  detail::check_clip(who, {clip.max_norm == 0 ? 1 : clip.max_norm, clip.norm_type, clip.group}, groups);
  require(clip.max_norm == 0 || !has_own_ranks, who,
          " knows one rank's gradients, and this optimizer's ranks clip together; use GradientClipping in a "
          "Session");
}

}  // namespace

void FusedOptimizer::clip_gradient_norm(double max_norm, double norm_type) {
  (void)engine();  // is there
  const std::string who = std::string(traits_->name) + ": clip_gradient_norm";
  check_local_clip(who, {max_norm, norm_type, {}}, param_groups_.size(), has_own_ranks());
  const bool has_groups = group_clips_ && group_clips_->clips().front().group;
  require(
      max_norm == 0 || !has_groups, who,
      " clips all groups together, and clip_group_gradient_norm has set a norm of one; set that to 0 first");
  max_norm_ = norm_type == 2 ? max_norm : 0;
  if (!has_groups) group_clips_ = nullptr;
  if (max_norm > 0 && norm_type != 2) {
    group_clips_ = std::make_shared<detail::GroupClips>(
        std::vector<detail::GradientClip>{{max_norm, norm_type, std::nullopt}});
  }
  if (clipping_) set_clipping(*clipping_);
}

void FusedOptimizer::clip_group_gradient_norm(size_t group, double max_norm, double norm_type) {
  (void)engine();  // is there
  const std::string who = std::string(traits_->name) + ": clip_group_gradient_norm";
  check_local_clip(who, {max_norm, norm_type, group}, param_groups_.size(), has_own_ranks());
  const bool has_all = max_norm_ != 0 || (group_clips_ && !group_clips_->clips().front().group);
  require(
      max_norm == 0 || !has_all, who,
      " clips one group, and clip_gradient_norm has set a norm of all groups together; set that to 0 first");
  if (has_all) return;
  std::vector<detail::GradientClip> clips = clips_of(group_clips_);
  clips.erase(
      std::remove_if(clips.begin(), clips.end(), [&](const auto& clip) { return clip.group == group; }),
      clips.end());
  if (max_norm > 0) clips.push_back({max_norm, norm_type, group});
  group_clips_ = clips.empty() ? nullptr : std::make_shared<detail::GroupClips>(std::move(clips));
  if (clipping_) set_clipping(*clipping_);
}

// Without a norm of all gradients the guard has one that none exceeds; factors of groups come with each step.
void FusedOptimizer::set_clipping(GradientGuard& guard) const {
  guard.clip_to(max_norm_ > 0 ? max_norm_ : std::numeric_limits<double>::max());
  guard.multiply_groups({});
}

double FusedOptimizer::gradient_norm() const {
  require(is_clipping(), traits_->name,
          ": gradient_norm is known where clip_gradient_norm has set a norm; call that first");
  return clipping_ ? clipping_->read().norm : 0;
}

StepInputs FusedOptimizer::clipped_step_inputs() {
  StepInputs inputs = plain_step_inputs();
  const auto first = std::find_if(param_groups_.begin(), param_groups_.end(),
                                  [](const auto& group) { return !group.params().empty(); });
  if (first == param_groups_.end()) return inputs;
  const at::Device device = first->params()[0].device();
  if (clipping_ == nullptr || clipping_->device() != device) {
    clipping_ = std::make_shared<GradientGuard>(device);
    set_clipping(*clipping_);
  }
  if (group_clips_) group_clips_->measure(param_groups_, *clipping_, inputs.average);
  inputs.guard = clipping_;
  return inputs;
}

}  // namespace pacer
