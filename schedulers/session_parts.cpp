#include <pacer/schedulers/session_parts.h>

#include <pacer/core/error.h>

namespace pacer {
namespace {

at::Device device_of_parameters(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.defined()) return parameter.device();
    }
  }
  throw InvalidArgument("a Session needs an optimizer with at least one parameter");
}

}  // namespace

SessionParts::SessionParts(torch::nn::Module& model, torch::optim::Optimizer& optimizer)
    : model_(model),
      optimizer_(optimizer),
      session_optimizer_(dynamic_cast<SessionOptimizer*>(&optimizer)),
      device_(device_of_parameters(optimizer)) {}

const std::shared_ptr<GradientGuard>& SessionParts::guard() {
  if (guard_ == nullptr) guard_ = std::make_shared<GradientGuard>(device_);
  return guard_;
}

}  // namespace pacer
