// A micro-step and a step of a Session, from begin to the hooks' last turn. What is around them is in
// session_set_up.cpp and session_evaluation.cpp.
#include <pacer/session/session.h>

#include <exception>
#include <utility>

#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <pacer/core/error.h>
#include <pacer/hooks/detail/device_copy.h>
#include <pacer/hooks/detail/forward_scope.h>
#include <pacer/hooks/detail/missed_parameters.h>
#include <pacer/hooks/detail/zeroed_gradients.h>
#include <pacer/hooks/step_report.h>
#include <pacer/session/detail/gradient_watch.h>
#include <pacer/session/detail/parameter_watch.h>
#include <pacer/session/detail/step_runner.h>
#include <pacer/session/detail/training_checks.h>

namespace pacer {
namespace {

// Weights of micro-batches are their tokens times this: exact in fp32 for any batch, and near 1, so that a
// loss scale has the room it expects.
constexpr double kWeightPerToken = 1.0 / 4096;

int64_t default_tokens(const at::Tensor& first) {
  if (first.dim() == 0) return 1;
  const bool holds_tokens =
      at::isIntegralType(first.scalar_type(), /*includeBool=*/false) && first.dim() >= 2;
  return holds_tokens ? first.size(0) * first.size(1) : first.size(0);
}

}  // namespace

void Session::require_between_micro_steps() {
  require(!finished_, "Session::begin after finish; make a new Session to train on");
  require(!in_backward_, "Session::begin after backward without step; call step() after every backward()");
  require(runner_ == nullptr || !runner_->has_failed(),
          "Session::begin after a finish whose step failed; call finish() again");
  parts_.world().check();
  start_training();
  trained_->check(parts_);
}

// What hooks make of a micro-batch, on the parameters' device.
MicroBatch Session::prepare(std::vector<at::Tensor> tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    require(tensors[i].defined(), "tensor ", i, " of the batch given to Session::begin is undefined");
  }
  MicroBatch batch;
  batch.examples = tensors[0].dim() == 0 ? 1 : tensors[0].size(0);
  batch.tokens = default_tokens(tensors[0]);
  batch.tensors = std::move(tensors);
  const size_t count = batch.tensors.size();
  for (const auto& hook : parts_.hooks_) hook->begin(parts_.progress, batch);
  require<Error>(batch.tensors.size() == count, "a hook changed the number of tensors in the batch from ",
                 count, " to ", batch.tensors.size(), "; a hook may replace tensors only");
  for (at::Tensor& tensor : batch.tensors) tensor = detail::copy_to_device(tensor, parts_.device());
  return batch;
}

std::vector<at::Tensor> Session::begin_micro_step(std::vector<at::Tensor> tensors) {
  require(parts_.replicas == nullptr,
          "Session::begin with a Pipeline; call pipeline.step(session, ...) in place of begin, forward and "
          "backward");
  require_between_micro_steps();
  if (forward_scope_) {
    forward_scope_->end();
    forward_scope_->throw_failure();
  }
  MicroBatch batch = prepare(std::move(tensors));
  forward_scope_ = std::make_shared<detail::HooksForwardScope>(parts_);
  micro_batch_tokens_ = batch.tokens;
  parts_.micro_batch_examples = batch.examples;
  in_forward_ = true;
  return std::move(batch.tensors);
}

double Session::weight_of(int64_t tokens) const {
  if (tokens == 0) return 0;
  return parts_.weight_by_tokens ? static_cast<double>(tokens) * kWeightPerToken : 1.0;
}

void Session::backward(const at::Tensor& loss, const BackwardOptions& options) {
  require(in_forward_, "Session::backward without begin; call begin, backward and step once per micro-batch");
  require(
      loss.defined() && loss.numel() == 1 && at::isFloatingType(loss.scalar_type()),
      "Session::backward needs a loss that is one floating-point number; take the mean over the micro-batch");
  require(loss.requires_grad(),
          "the loss given to Session::backward depends on no parameter that needs a "
          "gradient");
  gradients_->begin_pass(parts_, /*is_first=*/parts_.progress.micro_step == 0);
  gradients_->check_scope(parts_, *forward_scope_);
  forward_scope_->end();
  const double weight = weight_of(micro_batch_tokens_);
  const at::Tensor scaled = scaled_loss(loss, weight);
  WindowTotals& window = parts_.window;
  in_forward_ = false;
  window.tokens += micro_batch_tokens_;
  window.weight += weight;
  try {
    forward_scope_->throw_failure();
    begin_passes(parts_.progress);
    const auto weightless = zeroed_->scope(parts_, weight == 0);
    const bool is_last = parts_.progress.micro_step + 1 == parts_.progress.micro_steps;
    if (is_last && parts_.session_optimizer()) {
      parts_.session_optimizer()->begin_backward([this] { return parts_.coming_inputs(); });
    }
    scaled.backward(/*gradient=*/{}, options.retain_graph());
    if (weight == 0) detail::forget_micro_batch(parts_);
    end_passes();
  } catch (const std::exception& error) {
    fail_backward(error);
  }
}

// What backward begins with; the loss is recorded.
at::Tensor Session::scaled_loss(const at::Tensor& loss, double weight) {
  // A loss of 16 bits has no room for weights and loss scales.
  const bool is_narrow = loss.scalar_type() == at::kHalf || loss.scalar_type() == at::kBFloat16;
  at::Tensor scaled = is_narrow ? loss.to(at::kFloat) : loss;
  if (weight != 1) scaled = scaled * weight;
  if (parts_.record_loss) {
    at::Tensor part = scaled.detach().to(at::kFloat).reshape({});
    if (weight == 0) part = at::zeros_like(part);
    at::Tensor& sum = parts_.window.loss;
    sum = sum.defined() ? sum + part : part.clone();
  }
  for (const auto& hook : parts_.hooks_) scaled = hook->scale_loss(std::move(scaled));
  return scaled;
}

// Before the backward pass of a micro-step, or before those of all of a window, as its last one.
void Session::begin_passes(const Progress& progress) {
  gradients_->expect_gradients();
  if (parts_.releases_gradients) tell_gradients_ready(progress);  // the step is taken while they come
  for (const auto& hook : parts_.hooks_) hook->backward_begin(progress);
  const bool is_last = progress.micro_step + 1 == progress.micro_steps;
  if (is_last && parts_.session_optimizer()) parts_.session_optimizer()->expect_step();
}

// Behind them.
void Session::end_passes() {
  const Progress& progress = parts_.progress;
  for (const auto& hook : parts_.hooks_) hook->backward_end(progress);
  if (progress.micro_step + 1 == progress.micro_steps) check_unused();
  gradients_->end_pass(parts_);
  in_backward_ = true;
}

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
  progress.micro_steps = parts_.micro_steps_of(progress);
  in_backward_ = false;
  StepReport report(progress);
  if (totals.loss.defined() && totals.weight > 0) report.set_loss(totals.loss, 1.0 / totals.weight);
  if (parts_.has_guard()) report.set_check(parts_.guard()->memory());
  skipped_->after_step(parts_);
  for (const auto& hook : parts_.hooks_) hook->after_step(report);
}

// Gradients to parameters.
void Session::update(const Progress& window) {
  bool settled = true;
  for (const auto& hook : parts_.hooks_) settled = settled && hook->settled(window);
  make_gradients_ready(window);
  if (std::optional<StepInputs> inputs = parts_.step_inputs()) {
    inputs->freeze_allowed = settled;
    if (!parts_.releases_gradients) runner_->run(std::move(*inputs));
    parts_.optimizer().zero_grad();
  } else {
    skip_empty_window();
  }
  hooks_ready_ = 0;
}

// The mean gradient, as hooks make it of what backward has left. Where a step is taken again, those that had
// their turn do not get another one.
void Session::make_gradients_ready(const Progress& window) {
  if (hooks_ready_ > 0 && parts_.world().world_size() > 1) parts_.world().check();  // this rank has left
  if (hooks_ready_ == 0) {
    fill_unused_gradients(window);
    if (window.micro_steps < parts_.progress.micro_steps) {  // no backward was the last
      check_unused(gradients_->joined_since_pass());
    }
  }
  tell_gradients_ready(window);
  const bool there_were = gradients_->has_seen_any();
  gradients_->forget();
  const bool are_elsewhere = parts_.gradients_are_shared_out || !parts_.released.empty();
  if (!are_elsewhere) detail::check_gradients(parts_, there_were);
}

void Session::tell_gradients_ready(const Progress& window) {
  const auto& hooks = parts_.hooks_;
  for (; hooks_ready_ < hooks.size(); ++hooks_ready_) hooks[hooks_ready_]->gradients_ready(window);
}

void Session::fill_unused_gradients(const Progress& window) {
  if (parts_.gradients_are_shared_out) return;
  for (const at::Tensor& parameter : parts_.unused(window)) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (parameter.requires_grad() && !gradient.defined()) gradient = at::zeros_like(parameter).detach();
  }
}

// A rank that is alone keeps to the rule of several, which look when a window's last backward ends: what
// joins later sits the step out.
void Session::check_unused(const std::vector<at::Tensor>& joined) const {
  if (!parts_.world_was_given || parts_.world().world_size() > 1) return;
  if (!parts_.unused_is_zero) detail::check_all_reached(parts_, joined);
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

// Called where an exception is handled, and throws it again, or one that says more.
void Session::fail_backward(const std::exception& error) {
  std::exception_ptr better;
  for (const auto& hook : parts_.hooks_) {
    try {
      hook->backward_failed();
    } catch (...) {
      better = std::current_exception();
    }
  }
  drop_window();
  leave_peers(detail::concatenate("backward failed: ", error.what()));
  if (better) std::rethrow_exception(better);
  throw;
}

void Session::drop_window() {
  parts_.optimizer().zero_grad();
  parts_.progress.micro_step = 0;
  parts_.window = {};
  hooks_ready_ = 0;
  gradients_->forget();
}

// Where this rank cannot go on, the others must not wait for it.
void Session::leave_peers(const std::string& reason) noexcept {
  if (parts_.world().world_size() > 1) parts_.world().leave(reason);
}

}  // namespace pacer
