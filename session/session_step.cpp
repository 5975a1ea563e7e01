// What a Session does between the last backward of a window and the next begin.
#include <exception>
#include <utility>

#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <pacer/core/error.h>
#include <pacer/hooks/detail/missed_parameters.h>
#include <pacer/hooks/detail/zeroed_gradients.h>
#include <pacer/hooks/step_report.h>
#include <pacer/session/detail/gradient_watch.h>
#include <pacer/session/detail/step_runner.h>
#include <pacer/session/detail/training_checks.h>
#include <pacer/session/session.h>

namespace pacer {

bool Session::step() {
  require(in_backward_, "Session::step without backward; call begin, backward and step once per micro-batch");
  gradients_->check(parts_);
  Progress& progress = parts_.progress;
  if (progress.micro_step + 1 < progress.micro_steps) {
    ++progress.micro_step;
    in_backward_ = false;
    return false;
  }
  ++progress.micro_step;
  try {
    take_step();
  } catch (...) {
    if (progress.micro_step > 0) --progress.micro_step;  // the step was not taken; it may be tried again
    throw;
  }
  return true;
}

// The optimizer step of a window of progress.micro_step micro-steps.
void Session::take_step() {
  Progress& progress = parts_.progress;
  Progress window = progress;
  window.micro_step = 0;
  window.micro_steps = progress.micro_step;
  try {
    update(window);
  } catch (const std::exception& error) {
    leave_peers(detail::concatenate("its step failed: ", error.what()));
    throw;
  }
  const WindowTotals totals = std::exchange(parts_.window, {});
  ++progress.step;
  progress.micro_step = 0;
  progress.tokens += totals.tokens;
  in_backward_ = false;
  StepReport report(progress);
  if (totals.loss.defined() && totals.weight > 0) report.set_loss(totals.loss, 1.0 / totals.weight);
  if (parts_.has_guard()) report.set_check(parts_.guard()->memory());
  skipped_->after_step(parts_);
  for (const auto& hook : parts_.hooks_) hook->after_step(report);
}

// The mean gradient, as hooks make it of what backward has left. Where a step is taken again, those that had
// their turn do not get another one.
void Session::make_gradients_ready(const Progress& window) {
  const auto& hooks = parts_.hooks_;
  if (hooks_ready_ > 0 && parts_.world().world_size() > 1) parts_.world().check();  // this rank has left
  if (hooks_ready_ == 0) {
    fill_unused_gradients(window);
    if (window.micro_steps < parts_.progress.micro_steps) {  // no backward was the last
      check_unused(gradients_->joined_since_pass());
    }
  }
  for (; hooks_ready_ < hooks.size(); ++hooks_ready_) hooks[hooks_ready_]->gradients_ready(window);
  const bool there_were = gradients_->has_seen_any();
  gradients_->forget();
  if (!parts_.gradients_are_shared_out) detail::check_gradients(parts_, there_were);
}

// Gradients to parameters.
void Session::update(const Progress& window) {
  bool settled = true;
  for (const auto& hook : parts_.hooks_) settled = settled && hook->settled(window);
  make_gradients_ready(window);
  if (std::optional<StepInputs> inputs = parts_.step_inputs()) {
    inputs->freeze_allowed = settled;
    runner_->run(std::move(*inputs));
    parts_.optimizer().zero_grad();
  } else {
    skip_empty_window();
  }
  hooks_ready_ = 0;
}

// All ranks know that no rank trains on anything in this window: there is no mean to take.
void Session::skip_empty_window() {
  parts_.optimizer().zero_grad();
  if (warns_of_empty_window_.take()) {
    TORCH_WARN(detail::concatenate(
        "the window after step ", parts_.progress.step,
        " trains on no token, as count_tokens says of all its micro-batches; it changes nothing"));
  }
}

// A rank that is alone keeps to the rule of several, which look when a window's last backward ends: what
// joins later sits the step out.
void Session::check_unused(const std::vector<at::Tensor>& joined) const {
  if (!parts_.world_was_given || parts_.world().world_size() > 1) return;
  if (!parts_.unused_is_zero) detail::check_all_reached(parts_, joined);
}

void Session::fill_unused_gradients(const Progress& window) {
  if (parts_.gradients_are_shared_out) return;
  for (const at::Tensor& parameter : parts_.unused(window)) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (parameter.requires_grad() && !gradient.defined()) gradient = at::zeros_like(parameter).detach();
  }
}

void Session::drop_window() {
  parts_.optimizer().zero_grad();
  parts_.progress.micro_step = 0;
  parts_.window = {};
  hooks_ready_ = 0;
  gradients_->forget();
}

}  // namespace pacer
