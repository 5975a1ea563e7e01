#include <pacer/hooks/session_parts.h>

#include <utility>

#include <pacer/core/error.h>

namespace pacer {
namespace {

// A rank of a Pipeline may have no parameters; others are refused when all hooks are known.
at::Device device_of_parameters(const torch::optim::Optimizer& optimizer, const Communicator* world) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.defined()) return parameter.device();
    }
  }
  if (world != nullptr) return world->device();
  throw InvalidArgument("a Session needs an optimizer with at least one parameter");
}

}  // namespace

SessionParts::SessionParts(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                           std::shared_ptr<Communicator> world)
    : world_was_given(world != nullptr),
      model_(model),
      optimizer_(optimizer),
      session_optimizer_(dynamic_cast<SessionOptimizer*>(&optimizer)),
      device_(device_of_parameters(optimizer, world.get())),
      world_(world ? std::move(world) : Communicator::alone(device_)) {}

std::vector<at::Tensor> SessionParts::unused(const Progress& at) const {
  std::vector<at::Tensor> all;
  for (const auto& hook : hooks_) {
    for (const at::Tensor& parameter : hook->unused(at)) all.push_back(parameter);
  }
  return all;
}

const std::shared_ptr<GradientGuard>& SessionParts::guard(Look look) {
  looks_first_ = looks_first_ || look == Look::first;
  if (guard_ == nullptr) guard_ = std::make_shared<GradientGuard>(device_);
  return guard_;
}

std::optional<StepInputs> SessionParts::step_inputs() const {
  const double weight = window.weight * window.gradient_scale;
  if (weight == 0) return std::nullopt;
  StepInputs inputs;
  inputs.average = weight == 1 ? 1.0 : 1.0 / weight;
  inputs.local_weight = data_ranks().world_size() * window.gradient_scale;
  inputs.guard = guard_;
  return inputs;
}

std::optional<StepInputs> SessionParts::coming_inputs() const {
  if (learn_totals) learn_totals();
  return step_inputs();
}

}  // namespace pacer
