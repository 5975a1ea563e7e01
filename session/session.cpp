#include <pacer/session/session.h>

#include <cstdio>
#include <exception>
#include <utility>

#include <ATen/ops/zeros_like.h>

#include <pacer/core/error.h>
#include <pacer/hooks/detail/device_copy.h>
#include <pacer/hooks/detail/forward_scope.h>
#include <pacer/hooks/detail/zeroed_gradients.h>
#include <pacer/session/detail/gradient_watch.h>
#include <pacer/session/detail/parameter_watch.h>
#include <pacer/session/detail/step_runner.h>

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

// Where this rank cannot go on, the others must not wait for it.
void Session::leave_peers(const std::string& reason) noexcept {
  if (parts_.world().world_size() > 1) parts_.world().leave(reason);
}

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
  if (forward_scope_) forward_scope_->end();
  MicroBatch batch = prepare(std::move(tensors));
  forward_scope_ = std::make_shared<detail::HooksForwardScope>(parts_);
  micro_batch_tokens_ = batch.tokens;
  parts_.micro_batch_examples = batch.examples;
  in_forward_ = true;
  return std::move(batch.tensors);
}

void Session::count_tokens(int64_t tokens) {
  require(in_forward_, "Session::count_tokens belongs between begin and backward");
  require(tokens >= 0, "Session::count_tokens needs a number of tokens >= 0, not ", tokens);
  micro_batch_tokens_ = tokens;
}

void Session::count_examples(int64_t examples) {
  require(in_forward_, "Session::count_examples belongs between begin and backward");
  require(examples >= 0, "Session::count_examples needs a number of examples >= 0, not ", examples);
  parts_.micro_batch_examples = examples;
}

double Session::weight_of(int64_t tokens) const {
  if (tokens == 0) return 0;
  return parts_.weight_by_tokens ? static_cast<double>(tokens) * kWeightPerToken : 1.0;
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

void Session::backward(const at::Tensor& loss) {
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
    begin_passes(parts_.progress);
    const auto weightless = zeroed_->scope(parts_, weight == 0);
    const bool is_last = parts_.progress.micro_step + 1 == parts_.progress.micro_steps;
    if (is_last && parts_.session_optimizer()) {
      parts_.session_optimizer()->begin_backward([this] { return parts_.coming_inputs(); });
    }
    scaled.backward();
    if (weight == 0) detail::forget_micro_batch(parts_);
    end_passes();
  } catch (const std::exception& error) {
    fail_backward(error);
  }
}

void Session::finish() {
  if (finished_) return;
  require(!in_backward_, "Session::finish after backward without step; call step() after every backward()");
  if (forward_scope_) forward_scope_->end();
  in_forward_ = false;
  if (parts_.progress.micro_step > 0) {
    gradients_->check(parts_);
    take_step();
  }
  for (const auto& hook : parts_.hooks_) hook->finish(parts_.progress);
  finished_ = true;
}

void Session::print(const std::string& line) {
  if (!parts_.is_first_rank()) return;
  for (const auto& hook : parts_.hooks_) {
    if (hook->print(line)) return;
  }
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

double Session::gradient_norm() const {
  require(parts_.has_guard(), "this Session does not look at the gradient norm; add GradientClipping");
  return parts_.read_guard().norm;
}

int64_t Session::skipped_steps() const {
  if (parts_.session_optimizer()) return parts_.session_optimizer()->skipped_steps();
  return parts_.has_guard() ? parts_.read_guard().skipped_steps : 0;
}

}  // namespace pacer
