#include <pacer/optimizers/session_optimizer.h>

#include <pacer/core/error.h>

namespace pacer {

SessionOptimizer::LearningRateClaim SessionOptimizer::claim_learning_rate(const std::string& name) {
  const LearningRateClaim held = learning_rate_claim_.lock();
  require(held == nullptr, name, " cannot set the learning rate, because ", held ? *held : "",
          " already does; keep one of the two");
  const auto claim = std::make_shared<const std::string>(name);
  learning_rate_claim_ = claim;
  return claim;
}

void SessionOptimizer::update_only(const ParameterRanges& /*ranges*/,
                                   std::shared_ptr<Communicator> /*ranks*/) {
  throw InvalidArgument("ranks cannot share the work of this optimizer, because " +
                        unshared_reason(GradientScope::node));
}

void SessionOptimizer::begin_release(const StepInputs& /*inputs*/) {
  throw InvalidArgument("GradientRelease does not go with this optimizer, because " + unreleased_reason());
}
void SessionOptimizer::release(const torch::Tensor& /*parameter*/, ReleasedParameters& /*released*/) {
  throw Error("release of an optimizer without begin_release");
}
void SessionOptimizer::end_release(bool /*has_failed*/, ReleasedParameters& /*released*/) {
  throw Error("end_release of an optimizer without begin_release");
}

void SessionOptimizer::require_no_rank_state(const NamedTensors& rank_state) {
  require(rank_state.empty(), "the checkpoint has \"", rank_state.empty() ? "" : rank_state.begin()->first,
          "\" of each rank, of which this optimizer knows nothing; resume with the optimizer that was saved");
}

NamedTensors SessionOptimizer::join_rank_states(const NamedTensors& /*state*/,
                                                const std::vector<NamedTensors>& rank_states) const {
  for (const NamedTensors& state : rank_states) require_no_rank_state(state);
  return {};
}

}  // namespace pacer
