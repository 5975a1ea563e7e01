#include <pacer/optimizers/session_optimizer.h>

#include <cstdio>

#include <pacer/core/error.h>

namespace pacer {
namespace {

std::string text_of(const at::Tensor& number) {
  if (number.scalar_type() != at::kDouble) return std::to_string(number.item<int64_t>());
  char text[40];
  std::snprintf(text, sizeof text, "%.17g", number.item<double>());
  return text;
}

}  // namespace

std::vector<Fact> option_facts(const NamedTensors& state) {
  const std::string kGroup = "group/";
  std::vector<Fact> facts;
  for (const auto& [key, tensor] : state) {
    const std::string name = key.substr(key.rfind('/') + 1);
    const bool is_rate = name == "lr" || name == "initial_lr" || name == "has_initial_lr";
    const size_t number = key.find_first_not_of("0123456789", kGroup.size());
    const bool is_option = key.compare(0, kGroup.size(), kGroup) == 0 && number != std::string::npos &&
                           number > kGroup.size() && number == key.rfind('/');  // "group" may be a module
    if (!is_option || tensor.dim() != 0 || is_rate) continue;
    facts.push_back({"optimizer option " + key, text_of(tensor)});
  }
  return facts;
}

SessionOptimizer::LearningRateClaim SessionOptimizer::claim_learning_rate(const std::string& name) {
  const LearningRateClaim held = learning_rate_claim_.lock();
  require(held == nullptr, name, " cannot set the learning rate, because ", held ? *held : "",
          " already does; keep one of the two");
  const auto claim = std::make_shared<const std::string>(name);
  learning_rate_claim_ = claim;
  return claim;
}

void SessionOptimizer::own_parts(const std::vector<OwnedPart>& /*parts*/,
                                 std::shared_ptr<Communicator> /*ranks*/) {
  throw InvalidArgument("ranks cannot share the work of this optimizer, because " +
                        unshared_reason(GradientScope::node));
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
