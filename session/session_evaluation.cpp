// What a Session does beside training: passes that reserve memory, evaluation, what it tells and what it is told.
#include <cstdio>
#include <utility>

#include <ATen/ops/scalar_tensor.h>

#include <pacer/collectives/detail/all_ranks_or_none.h>
#include <pacer/core/error.h>
#include <pacer/hooks/detail/evaluation_scope.h>
#include <pacer/hooks/detail/forward_scope.h>
#include <pacer/hooks/detail/model_facts.h>
#include <pacer/hooks/detail/training_tensors.h>
#include <pacer/hooks/detail/wide_gradients.h>
#include <pacer/session/detail/prewarm_scope.h>
#include <pacer/session/session.h>

namespace pacer {

void Session::prewarm(const std::function<at::Tensor()>& loss) {
  require(parts_.progress.micro_step == 0 && !in_forward_ && !in_backward_,
          "Session::prewarm belongs between steps; call it before begin");
  require(
      parts_.replicas == nullptr,
      "Session::prewarm with a Pipeline: no rank has the whole model, so there is no pass to run here; leave "
      "prewarm out");
  require(!parts_.releases_gradients,
          "Session::prewarm with GradientRelease: its passes would hold all gradients, which no step does; "
          "leave prewarm out");
  detail::check_writable(detail::model_tensors(parts_.model()));
  start_training();
  detail::set_up(parts_.world(), [&] { prewarm_passes(loss); });
}

void Session::prewarm_passes(const std::function<at::Tensor()>& loss) {
  const detail::PrewarmScope restore(parts_);
  prewarm_pass(loss);
  // With gradients at hand one of pacer's optimizers can make its state; then a pass beside it.
  StepInputs inputs;
  if (parts_.has_guard()) inputs.guard = parts_.guard();
  if (SessionOptimizer* optimizer = parts_.session_optimizer()) {
    optimizer->prepare(inputs);
    optimizer->expect_step();  // what was prepared is not enqueued; the pass below comes as before a step
  }
  if (parts_.micro_steps == 1) {
    parts_.optimizer().zero_grad();
  } else if (parts_.accumulate_in_fp32) {
    detail::WideGradients::widen(detail::all_optimizer_parameters(parts_));
  }
  prewarm_pass(loss);
}

void Session::prewarm_pass(const std::function<at::Tensor()>& loss) {
  Progress first;  // at step 0 no layer is dropped
  first.micro_steps = parts_.progress.micro_steps;
  at::Tensor result;
  {
    const detail::ScopedValue<Progress> restore(parts_.progress, first);
    detail::HooksForwardScope scope(parts_);
    result = loss();
    scope.end();
    scope.throw_failure();
  }
  require(result.defined() && result.numel() == 1 && result.requires_grad(),
          "Session::prewarm needs a function that returns a loss: one number that depends on the parameters");
  for (const auto& hook : parts_.hooks_) result = hook->scale_loss(std::move(result));
  if (parts_.sharded_state) {
    parts_.sharded_state->run_idle_pass(first, [&] { result.backward(); });
  } else {
    result.backward();
  }
}

std::shared_ptr<detail::EvaluationScope> Session::begin_evaluation() {
  require(!in_forward_, "Session::evaluate belongs between steps, not between begin and backward");
  return std::make_shared<detail::EvaluationScope>(parts_);
}

void Session::end_evaluation(detail::EvaluationScope& scope) { scope.end_pass(); }

WholeParameters Session::whole_parameters() const {
  require(!in_forward_ && !in_backward_ && parts_.progress.micro_step == 0,
          "Session::whole_parameters belongs between steps, not between begin and step");
  require(
      parts_.replicas == nullptr,
      "Session::whole_parameters with a Pipeline: each rank has its stage only; read the whole model from a "
      "checkpoint");
  return parts_.sharded_state ? parts_.sharded_state->whole_parameters() : WholeParameters(nullptr);
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

void Session::print(const std::string& line) {
  if (!parts_.is_first_rank()) return;
  for (const auto& hook : parts_.hooks_) {
    if (hook->print(line)) return;
  }
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

void Session::record(const std::string& name, const at::Tensor& value) {
  require(value.defined() && value.layout() == at::kStrided && value.numel() == 1 && !value.is_complex(),
          "Session::record(\"", name, "\") takes one real number, not ",
          value.defined() ? detail::concatenate("a tensor of shape ", value.sizes(), " and dtype ",
                                                c10::toString(value.scalar_type()))
                          : std::string("an undefined tensor"),
          "; record a mean, say");
  for (const auto& hook : parts_.hooks_) {
    if (hook->record(name, value)) return;
  }
  throw InvalidArgument(detail::concatenate("Session::record(\"", name,
                                            "\") needs the Metrics hook, which writes it down; add "
                                            "session.use(pacer::Metrics(\"run\")) before training"));
}

void Session::record(const std::string& name, double value) {
  record(name, at::scalar_tensor(value, at::kDouble));
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
