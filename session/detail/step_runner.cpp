#include <pacer/session/detail/step_runner.h>

#include <optional>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/core/error.h>
#include <pacer/core/reduction_order.h>
#include <pacer/optimizers/detail/tensor_sums.h>
#include <pacer/optimizers/detail/tile_loop.h>
#include <pacer/session/detail/step_graph.h>

namespace pacer::detail {
namespace {

// Nothing for dtypes that no kernel reads.
std::optional<kernels::GradientType> type_of(const at::Tensor& gradient) {
  switch (gradient.scalar_type()) {
    case at::kDouble:
      return kernels::GradientType::f64;
    case at::kFloat:
      return kernels::GradientType::f32;
    case at::kBFloat16:
      return kernels::GradientType::bf16;
    case at::kHalf:
      return kernels::GradientType::f16;
    default:
      return std::nullopt;
  }
}

// In the order and precision of the fused optimizers. Sums of fp32 numbers in fp32 would lose percents of
// large tensors.
double sum_of_squares_on_cpu(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> dense;
  std::vector<int64_t> counts;
  for (const at::Tensor& gradient : gradients) {
    at::Tensor values = gradient.is_complex() ? at::view_as_real(gradient.resolve_conj()) : gradient;
    if (!type_of(values)) values = values.to(at::kFloat);
    const bool is_plain =
        values.is_non_overlapping_and_dense() && !values.is_neg() && !values._is_zerotensor();
    dense.push_back(is_plain ? values : values.clone(at::MemoryFormat::Contiguous));
    counts.push_back(dense.back().numel());
  }
  const std::vector<Tile> units = make_tiles(counts, kReductionUnit);
  std::vector<double> sums(units.size());
  for_each_tile(units, [&](int64_t i) {
    const Tile& unit = units[static_cast<size_t>(i)];
    const at::Tensor& values = dense[unit.tensor];
    sums[static_cast<size_t>(i)] = unit_sum_of_squares(*type_of(values), values.const_data_ptr(), unit);
  });
  return sum_partials(sums.data(), static_cast<int64_t>(sums.size()));
}

// fp64, no dimensions: the sum of squares of all gradients, on `device`.
at::Tensor sum_of_squares(const std::vector<at::Tensor>& gradients, at::Device device) {
  std::vector<at::Tensor> on_cpu, wide, others;
  for (const at::Tensor& gradient : gradients) {
    const bool is_wide = gradient.scalar_type() == at::kDouble;
    (gradient.is_cpu() ? on_cpu : is_wide ? wide : others).push_back(gradient);
  }
  const auto kind = at::TensorOptions().dtype(at::kDouble).device(device);
  at::Tensor sum = at::full({}, sum_of_squares_on_cpu(on_cpu), kind);
  for (const auto* alike : {&wide, &others}) {
    if (alike->empty()) continue;
    std::vector<at::Tensor> norms = at::_foreach_norm(*alike, 2, alike == &wide ? at::kDouble : at::kFloat);
    for (at::Tensor& norm : norms) norm = norm.to(device);
    sum.add_(at::stack(norms).to(at::kDouble).square().sum());
  }
  return sum;
}

std::vector<at::Tensor> gradients_of(const torch::optim::OptimizerParamGroup& group) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& parameter : group.params()) {
    if (parameter.grad().defined()) all.push_back(parameter.grad());
  }
  return all;
}

}  // namespace

StepRunner::StepRunner(SessionParts& parts) : parts_(parts) {
  if (parts.replay_optimizer) graph_ = std::make_unique<StepGraph>();
}
StepRunner::~StepRunner() = default;

void StepRunner::run(StepInputs inputs) {
  if (parts_.replicas && gradients().empty()) {
    // A rank of a pipeline may have nothing to update, but the look is all of its ranks'.
    if (parts_.has_guard()) look({}, inputs.average);
  } else if (SessionOptimizer* own = parts_.session_optimizer()) {
    inputs.replayable = graph_ != nullptr;
    own->prepare(inputs);
    own->conclude(graph_ ? graph_->enqueue(*own, parts_.device()) : own->enqueue());
  } else {
    if (!has_failed_) are_finite_ = finish_gradients(inputs.average);
    has_failed_ = true;
    if (are_finite_) parts_.optimizer().step();
    has_failed_ = false;
  }
}

void StepRunner::look(const std::vector<at::Tensor>& gradients, double average) {
  GradientGuard& guard = *parts_.guard();
  const c10::DeviceGuard device_guard(guard.device());
  const at::Tensor sum = sum_of_squares(gradients, guard.device());
  guard.set_average(average);
  guard.look(sum.const_data_ptr<double>(), 1);
}

std::vector<at::Tensor> StepRunner::gradients() const {
  std::vector<at::Tensor> all;
  for (const auto& group : parts_.optimizer().param_groups()) {
    for (at::Tensor& gradient : gradients_of(group)) all.push_back(std::move(gradient));
  }
  return all;
}

// The gradients are finite.
void StepRunner::multiply(const GradientGuard& guard) const {
  if (!guard.group_factors().defined()) return at::_foreach_mul_(gradients(), guard.factor());
  const auto& groups = parts_.optimizer().param_groups();
  for (size_t g = 0; g < groups.size(); ++g) {
    const std::vector<at::Tensor> of_group = gradients_of(groups[g]);
    if (of_group.empty()) continue;
    const bool has_factor = guard.group_factor(g) != nullptr;
    at::_foreach_mul_(of_group, has_factor ? guard.factor() * guard.group_factors()[static_cast<int64_t>(g)]
                                           : guard.factor());
  }
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
  look(all, average);
  GradientGuard& guard = *parts_.guard();
  const c10::DeviceGuard device_guard(guard.device());
  if (guard.read().non_finite) return false;
  multiply(guard);
  return true;
}

}  // namespace pacer::detail
