#include <pacer/schedulers/detail/step_runner.h>

#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/core/error.h>
#include <pacer/schedulers/detail/step_graph.h>

namespace pacer::detail {
namespace {

// fp64, no dimensions: the sum of squares of all gradients, on `device`.
at::Tensor sum_of_squares(const std::vector<at::Tensor>& gradients, at::Device device) {
  at::Tensor sum = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device));
  for (const bool is_double : {false, true}) {
    std::vector<at::Tensor> alike;
    for (const at::Tensor& gradient : gradients) {
      if ((gradient.scalar_type() == at::kDouble) == is_double) alike.push_back(gradient);
    }
    if (alike.empty()) continue;
    std::vector<at::Tensor> norms = at::_foreach_norm(alike, 2, is_double ? at::kDouble : at::kFloat);
    for (at::Tensor& norm : norms) norm = norm.to(device);
    sum.add_(at::stack(norms).to(at::kDouble).square().sum());
  }
  return sum;
}

}  // namespace

StepRunner::StepRunner(SessionParts& parts) : parts_(parts) {
  if (parts.replay_optimizer) graph_ = std::make_unique<StepGraph>();
}
StepRunner::~StepRunner() = default;

void StepRunner::run(double average, double local_weight, bool freeze_allowed) {
  if (parts_.replicas && gradients().empty()) {
    look_at_nothing(average);
  } else if (SessionOptimizer* own = parts_.session_optimizer()) {
    run_own(*own, average, local_weight, freeze_allowed);
  } else {
    run_other(average);
  }
}

// A rank of a pipeline may have nothing to update, but the look is all of its ranks'.
void StepRunner::look_at_nothing(double average) {
  if (!parts_.has_guard()) return;
  GradientGuard& guard = *parts_.guard();
  const c10::DeviceGuard device_guard(guard.device());
  const at::Tensor sum = sum_of_squares({}, guard.device());
  guard.set_average(average);
  guard.look(sum.const_data_ptr<double>(), 1);
}

void StepRunner::run_own(SessionOptimizer& optimizer, double average, double local_weight,
                         bool freeze_allowed) {
  StepInputs inputs;
  inputs.average = average;
  inputs.local_weight = local_weight;
  if (parts_.has_guard()) inputs.guard = parts_.guard();
  inputs.freeze_allowed = freeze_allowed;
  inputs.replayable = graph_ != nullptr;
  optimizer.prepare(inputs);
  optimizer.conclude(graph_ ? graph_->enqueue(optimizer, parts_.device()) : optimizer.enqueue());
}

std::vector<at::Tensor> StepRunner::gradients() const {
  std::vector<at::Tensor> all;
  for (const auto& group : parts_.optimizer().param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.grad().defined()) all.push_back(parameter.grad());
    }
  }
  return all;
}

bool StepRunner::finish_gradients(double average) {
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> all = gradients();
  if (all.empty()) return true;
  if (!parts_.has_guard()) {
    if (average != 1) at::_foreach_mul_(all, average);
    return true;
  }
  for (const at::Tensor& gradient : all) {
    require(
        gradient.layout() == at::kStrided,
        "a sparse gradient cannot be clipped or checked; make the layer's gradients dense, or use neither "
        "GradientClipping nor Precision");
  }
  GradientGuard& guard = *parts_.guard();
  const c10::DeviceGuard device_guard(guard.device());
  const at::Tensor sum = sum_of_squares(all, guard.device());
  guard.set_average(average);
  guard.look(sum.const_data_ptr<double>(), 1);
  if (guard.read().non_finite) return false;
  at::_foreach_mul_(all, guard.factor());
  return true;
}

void StepRunner::run_other(double average) {
  if (finish_gradients(average)) parts_.optimizer().step();
}

}  // namespace pacer::detail
