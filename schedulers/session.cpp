#include <pacer/schedulers/session.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <limits>
#include <utility>

#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <pacer/core/error.h>
#include <pacer/schedulers/checkpoints.h>
#include <pacer/schedulers/data_parallel.h>
#include <pacer/schedulers/detail/device_copy.h>
#include <pacer/schedulers/detail/epoch_sampler_hook.h>
#include <pacer/schedulers/detail/evaluation_scope.h>
#include <pacer/schedulers/detail/forward_scope.h>
#include <pacer/schedulers/detail/layer_drop_hook.h>
#include <pacer/schedulers/detail/pipeline_hook.h>
#include <pacer/schedulers/detail/step_runner.h>
#include <pacer/schedulers/detail/training_checks.h>
#include <pacer/schedulers/detail/zeroed_gradients.h>
#include <pacer/schedulers/layer_drop.h>
#include <pacer/schedulers/learning_rate.h>
#include <pacer/schedulers/metrics.h>
#include <pacer/schedulers/pipeline.h>
#include <pacer/schedulers/shards.h>
#include <pacer/schedulers/step_report.h>

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

// LibTorch's messages go on with a back trace.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

const char* slot_name(Slot slot) {
  constexpr const char* kNames[] = {"data",     "forward",  "loss",   "reduce", "clip",      "optimize",
                                    "schedule", "validate", "decide", "record", "checkpoint"};
  return kNames[static_cast<size_t>(slot)];
}

}  // namespace

Session::Session(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                 std::shared_ptr<Communicator> world)
    : parts_(model, optimizer, std::move(world)),
      gradients_(std::make_unique<detail::GradientWatch>()),
      trained_(std::make_unique<detail::ParameterWatch>()),
      skipped_(std::make_unique<detail::SkippedStepsWatch>(parts_)),
      zeroed_(std::make_unique<detail::ZeroedGradients>()),
      warns_of_empty_window_(parts_.is_first_rank()) {
  if (!parts_.world_was_given) detail::check_single_rank();
  if (parts_.session_optimizer()) parts_.session_optimizer()->name_parameters(model.named_parameters());
}

Session::~Session() {
  if (forward_scope_) forward_scope_->end();
  if (training_ && !finished_) {
    leave_peers(std::uncaught_exceptions() > 0 ? "an exception ended its training"
                                               : "its Session ended without finish()");
  }
  if (!finished_ && parts_.progress.micro_step > 0 && std::uncaught_exceptions() == 0) {
    TORCH_WARN("a pacer::Session ends with the gradients of ", parts_.progress.micro_step, " of ",
               parts_.progress.micro_steps, " micro-steps unused; call finish() after the loop");
  } else if (training_ && !finished_ && std::uncaught_exceptions() == 0 &&
             (parts_.find<Checkpoints>() != nullptr || parts_.find<Metrics>() != nullptr)) {
    TORCH_WARN(
        "a pacer::Session ends without finish(), so its last checkpoint and metrics are not written; call "
        "finish() after the loop");
  }
}

Session& Session::use(std::shared_ptr<Hook> hook) {
  require(hook != nullptr, "Session::use was given a null hook");
  require(!started_, "Session::use(", hook->hook_name(),
          ") after begin or resume; add all hooks before them");
  for (const auto& other : parts_.hooks_) {
    require(other->hook_name() != hook->hook_name(), "this Session already has the hook ", hook->hook_name(),
            "; use it once");
    require(!(other->exclusive() && hook->exclusive() && other->slot() == hook->slot()), "the hooks ",
            other->hook_name(), " and ", hook->hook_name(), " both do the work of the slot \"",
            slot_name(hook->slot()), "\"; use one of them");
  }
  hook->attach(parts_);
  const auto key = [](const Hook& h) { return std::make_pair(h.slot(), h.hook_name()); };
  const auto place = std::upper_bound(parts_.hooks_.begin(), parts_.hooks_.end(), hook,
                                      [&](const auto& a, const auto& b) { return key(*a) < key(*b); });
  parts_.hooks_.insert(place, std::move(hook));
  return *this;
}

Session& Session::use(const LayerDrop& layer_drop) {
  return use(std::make_shared<detail::LayerDropHook>(layer_drop));
}

Session& Session::use(const EpochSampler& sampler) {
  return use(std::make_shared<detail::EpochSamplerHook>(sampler));
}

Session& Session::use(const Pipeline& pipeline) { return use(pipeline.hook()); }

// Once, when all hooks are known.
void Session::start() {
  if (started_) return;
  for (const auto& module : parts_.model().modules(/*include_self=*/false)) {
    const auto* gates = dynamic_cast<const LayerDropImpl*>(module.get());
    require(
        gates == nullptr || gates->is_in_use(),
        "the model has a LayerDrop that this Session does not know, so no layer would ever be dropped; add "
        "session.use(layer_drop)");
  }
  detail::check_values(parts_);
  require(
      parts_.find<Shards>() != nullptr || parts_.session_optimizer() == nullptr ||
          !parts_.session_optimizer()->is_shared_out(),
      "the optimizer has state for this rank's part of the parameters only, because a Session with Shards "
      "used it; use Shards again, or save a checkpoint there and resume from it with a new optimizer");
  detail::check_parameters(parts_);
  if (parts_.world().world_size() > 1 && parts_.find<JoinedRanks>() == nullptr) use(DataParallel());
  parts_.progress.micro_steps = parts_.micro_steps;
  runner_ = std::make_unique<detail::StepRunner>(parts_);
  for (const auto& hook : parts_.hooks_) hook->arrange();
  started_ = true;
}

// Once, when it is known where this run starts.
void Session::start_training() {
  start();
  if (training_) return;
  if (parts_.session_optimizer()) {
    RunPlan plan;
    plan.unsettled = [this](int64_t step) { return unsettled(step); };
    if (const auto* rate = parts_.find<LearningRate>()) plan.end = rate->schedule().steps_until_zero();
    plan.has_guard = parts_.has_guard();
    parts_.session_optimizer()->check_run(parts_.world(), plan);
  }
  for (const auto& hook : parts_.hooks_) hook->start(parts_.progress);
  trained_->remember(parts_);
  training_ = true;
}

// What still moves after so many steps, as far as steps say: what ends by tokens is taken to have ended.
std::string Session::unsettled(int64_t step) const {
  Progress then = parts_.progress;
  then.step = step;
  then.micro_step = 0;
  then.tokens = std::numeric_limits<int64_t>::max() / 2;
  for (const auto& hook : parts_.hooks_) {
    if (!hook->settled(then)) return "the hook " + hook->hook_name();
  }
  return "";
}

// Where this rank cannot go on, the others must not wait for it.
void Session::leave_peers(const std::string& reason) noexcept {
  if (parts_.world().world_size() > 1) parts_.world().leave(reason);
}

void Session::require_between_micro_steps() {
  require(!finished_, "Session::begin after finish; make a new Session to train on");
  require(!in_backward_, "Session::begin after backward without step; call step() after every backward()");
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
  leave_peers(detail::concatenate("backward failed: ", first_line(error.what())));
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
  gradients_->check(parts_);
  forward_scope_->end();
  const double weight = weight_of(micro_batch_tokens_);
  const at::Tensor scaled = scaled_loss(loss, weight);
  WindowTotals& window = parts_.window;
  in_forward_ = false;
  window.tokens += micro_batch_tokens_;
  window.weight += weight;
  try {
    for (const auto& hook : parts_.hooks_) hook->backward_begin(parts_.progress);
    const auto zeroed = zeroed_->scope(parts_, weight == 0);
    const bool is_last = parts_.progress.micro_step + 1 == parts_.progress.micro_steps;
    if (is_last && parts_.session_optimizer()) {
      parts_.session_optimizer()->expect_step();
      parts_.session_optimizer()->begin_backward([this] { return parts_.coming_inputs(); });
    }
    scaled.backward();
    for (const auto& hook : parts_.hooks_) hook->backward_end(parts_.progress);
  } catch (const std::exception& error) {
    fail_backward(error);
  }
  in_backward_ = true;
  if (parts_.progress.micro_step + 1 < parts_.progress.micro_steps) gradients_->remember(parts_);
}

bool Session::step() {
  require(in_backward_, "Session::step without backward; call begin, backward and step once per micro-batch");
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
    leave_peers(detail::concatenate("its step failed: ", first_line(error.what())));
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

// Gradients to parameters.
void Session::update(const Progress& window) {
  fill_unused_gradients(window);
  bool settled = true;
  for (const auto& hook : parts_.hooks_) settled = settled && hook->settled(window);
  for (const auto& hook : parts_.hooks_) hook->gradients_ready(window);
  gradients_->forget();
  if (!parts_.gradients_are_shared_out) detail::check_gradients(parts_);
  const std::optional<StepInputs> inputs = parts_.step_inputs();
  if (!inputs) return skip_empty_window();
  runner_->run(inputs->average, inputs->local_weight, settled);
  parts_.optimizer().zero_grad();
}

// All ranks know that no rank trains on anything in this window: there is no mean to take.
void Session::skip_empty_window() {
  parts_.optimizer().zero_grad();
  if (warns_of_empty_window_.take()) {
    TORCH_WARN("the window after step ", parts_.progress.step,
               " trains on no token, as count_tokens says of all its micro-batches; it changes nothing");
  }
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
  gradients_->forget();
}

void Session::finish() {
  if (finished_) return;
  require(!in_backward_, "Session::finish after backward without step; call step() after every backward()");
  if (forward_scope_) forward_scope_->end();
  in_forward_ = false;
  if (parts_.progress.micro_step > 0) take_step();
  for (const auto& hook : parts_.hooks_) hook->finish(parts_.progress);
  finished_ = true;
}

void Session::print(const std::string& line) {
  if (auto* metrics = parts_.find<Metrics>()) {
    metrics->print(line);
  } else if (parts_.is_first_rank()) {
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  }
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
