#include <pacer/optimizers/detail/group_clips.h>

#include <cmath>
#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/collectives/communicator.h>
#include <pacer/core/error.h>
#include <pacer/optimizers/detail/gradient_norms.h>

namespace pacer::detail {
namespace {

// What is here of the gradients of a group, each element on one rank.
void add_gradients(const torch::optim::OptimizerParamGroup& group, const ParameterRanges& parts,
                   const Communicator* ranks, std::vector<at::Tensor>& gradients) {
  for (const at::Tensor& parameter : group.params()) {
    const auto part = parts.find(parameter.unsafeGetTensorImpl());
    const bool is_part = part != parts.end() && part->second.gradient.defined();
    if (!is_part && ranks != nullptr && ranks->rank() != 0) continue;
    const at::Tensor gradient = is_part ? part->second.gradient : parameter.grad();
    if (!gradient.defined()) continue;
    require(gradient.layout() == at::kStrided,
            "a sparse gradient cannot be clipped; make the layer's gradients dense, or leave out clipping");
    gradients.push_back(gradient);
  }
}

}  // namespace

void check_clip(const std::string& who, const GradientClip& clip, size_t groups) {
  require(std::isfinite(clip.max_norm) && clip.max_norm > 0, who, " needs a finite norm > 0, not ",
          clip.max_norm);
  require(clip.norm_type > 0, who, " needs a norm_type > 0, such as 1, 2 or infinity, not ", clip.norm_type);
  require(!clip.group || *clip.group < groups, who, " was given parameter group ", clip.group.value_or(0),
          ", but the optimizer has ", groups, ", which are numbered from 0");
}

void GroupClips::measure(const std::vector<torch::optim::OptimizerParamGroup>& groups, GradientGuard& guard,
                         double average, const ParameterRanges& parts, Communicator* ranks) {
  const at::NoGradGuard no_grad;
  const c10::DeviceGuard device_guard(guard.device());
  std::vector<std::vector<at::Tensor>> gradients(clips_.size());
  for (size_t c = 0; c < clips_.size(); ++c) {
    for (size_t g = 0; g < groups.size(); ++g) {
      if (clips_[c].group.value_or(g) == g) add_gradients(groups[g], parts, ranks, gradients[c]);
    }
  }
  const auto count = static_cast<int64_t>(groups.size());
  const auto options = at::TensorOptions().dtype(at::kDouble).device(guard.device());
  if (!factors_.defined() || factors_.numel() != count || factors_.device() != guard.device())
    factors_ = at::ones({count}, options);
  norms_.clear();
  for (size_t c = 0; c < clips_.size(); ++c) {
    const at::Tensor stored = gradient_norm(gradients[c], clips_[c].norm_type, guard.device(), ranks);
    const at::Tensor norm = stored * average / guard.loss_scale().to(at::kDouble);
    const at::Tensor factor = (clips_[c].max_norm / norm).clamp_max(1.0);
    const at::Tensor checked = at::where(norm.isfinite(), factor, std::numeric_limits<double>::quiet_NaN());
    clips_[c].group ? factors_.select(0, static_cast<int64_t>(*clips_[c].group)).copy_(checked)
                    : factors_.copy_(checked.expand({count}));
    norms_.push_back(norm);
  }
  guard.multiply_groups(factors_);
}

}  // namespace pacer::detail
