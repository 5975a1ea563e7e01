#include <pacer/hooks/gradient_clipping.h>

#include <cmath>
#include <set>
#include <utility>

#include <pacer/core/error.h>
#include <pacer/files/number_text.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/sharded_state.h>
#include <pacer/hooks/step_report.h>
#include <pacer/optimizers/detail/group_clips.h>
#include <pacer/optimizers/gradient_guard.h>
#include <pacer/optimizers/onebit_muon.h>
#include <pacer/optimizers/onebit_optimizer.h>

namespace pacer {
namespace {

void check_clipping(const GradientClippingOptions& options, bool is_alone) {
  detail::check_clip("GradientClipping", {options.max_norm(), options.norm_type(), std::nullopt}, 0);
  require(!options.group() || *options.group() >= 0,
          "GradientClippingOptions::group counts from 0 and cannot be ", options.group().value_or(0));
  require(
      is_alone || options.group(),
      "GradientClipping was given several norms, and one of them is of all groups; say of each which group "
      "it clips");
  require(!options.by_previous_norm() || (options.norm_type() == 2 && !options.group()),
          "GradientClippingOptions::by_previous_norm is about the Euclidean norm of all gradients; leave out "
          "norm_type and group, or by_previous_norm");
}

bool is_onebit(const torch::optim::Optimizer& optimizer) {
  return dynamic_cast<const OneBitOptimizer*>(&optimizer) != nullptr ||
         dynamic_cast<const OneBitMuon*>(&optimizer) != nullptr;
}

std::vector<detail::GradientClip> clips_of(const std::vector<GradientClippingOptions>& options) {
  std::vector<detail::GradientClip> clips;
  for (const GradientClippingOptions& of_one : options) {
    clips.push_back({of_one.max_norm(), of_one.norm_type(), std::nullopt});
    if (of_one.group()) clips.back().group = static_cast<size_t>(*of_one.group());
  }
  return clips;
}

}  // namespace

GradientClipping::GradientClipping(std::vector<GradientClippingOptions> options)
    : options_(std::move(options)) {
  require(!options_.empty(), "GradientClipping was given no norm; give it one, or leave the hook out");
  std::set<int64_t> groups;
  for (const GradientClippingOptions& of_one : options_) {
    check_clipping(of_one, options_.size() == 1);
    require(!of_one.group() || groups.insert(*of_one.group()).second, "GradientClipping was given group ",
            of_one.group().value_or(0), " twice; give it one norm");
  }
}

std::string GradientClipping::agreement() const {
  std::string text;
  for (const GradientClippingOptions& of_one : options_) {
    text += (text.empty() ? "norm " : ", norm ") + exact_text(of_one.max_norm());
    if (of_one.norm_type() != 2) text += " of order " + exact_text(of_one.norm_type());
    if (of_one.group()) text += " of group " + std::to_string(*of_one.group());
  }
  return text + (by_previous_norm() ? ", buckets by the norm before" : "");
}

void GradientClipping::attach(SessionParts& parts) {
  using Look = SessionParts::Look;
  const bool by_guard = options_.front().norm_type() == 2 && !options_.front().group();
  if (!by_guard) {
    const std::vector<detail::GradientClip> clips = clips_of(options_);
    for (const detail::GradientClip& clip : clips)
      detail::check_clip("GradientClipping", clip, parts.optimizer().param_groups().size());
    require(
        !is_onebit(parts.optimizer()),
        "GradientClipping of a group or by a norm_type other than 2 needs gradients that are averaged over "
        "ranks, which those of a 1-bit optimizer are not; leave out group and norm_type");
    clips_ = std::make_shared<detail::GroupClips>(clips);
  }
  parts_ = &parts;
  guard_ = parts.guard(by_previous_norm() ? Look::any_time : Look::first);
  if (!clips_) guard_->clip_to(options_.front().max_norm(), by_previous_norm());
}

void GradientClipping::arrange() {
  require(
      !clips_ || parts_->replicas == nullptr,
      "GradientClipping of a group or by a norm_type other than 2 does not go with a Pipeline, whose stages "
      "have parameter groups of their own; leave out group and norm_type");
}

// The gradients are there: they have been reduced in an earlier slot.
void GradientClipping::gradients_ready(const Progress& /*progress*/) {
  if (!clips_) return;
  const std::optional<StepInputs> inputs = parts_->step_inputs();
  if (!inputs) return;  // the window trains on nothing
  ShardedState::GradientParts shared;
  if (parts_->sharded_state != nullptr) shared = parts_->sharded_state->gradient_parts();
  clips_->measure(parts_->optimizer().param_groups(), *guard_, inputs->average, shared.parts,
                  shared.ranks.get());
}

void GradientClipping::after_step(StepReport& report) {
  if (!clips_) return;
  for (size_t c = 0; c < clips_->norms().size(); ++c) {
    const std::optional<size_t> group = clips_->clips()[c].group;
    report.add(group ? "clipped_norm_" + std::to_string(*group) : "clipped_norm", clips_->norms()[c]);
  }
}

// The exact form goes on from nothing.
void GradientClipping::save(NamedTensors& state) const {
  if (by_previous_norm()) state["previous_norm"] = number_tensor(guard_->read().last_norm);
}

void GradientClipping::load(const NamedTensors& state) {
  if (!by_previous_norm()) return;
  const auto norm = require_number<double>(state, "previous_norm");
  require(std::isfinite(norm) && norm >= 0, "\"previous_norm\" of the state to load is ", norm,
          ", which no norm can be");
  kernels::GradientCheck check = guard_->read();
  check.last_norm = norm;
  guard_->write(check);
}

}  // namespace pacer
