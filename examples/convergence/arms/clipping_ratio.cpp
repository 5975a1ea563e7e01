#include "clipping_ratio.h"

#include <cmath>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>

#include <pacer/collectives/communicator.h>
#include <pacer/core/error.h>

namespace convergence {
namespace {

double sum_of_squares(const std::vector<at::Tensor>& tensors) {
  double sum = 0;
  for (const at::Tensor& tensor : tensors) sum += tensor.to(at::kDouble).square().sum().item<double>();
  return sum;
}

}  // namespace

bool ProbingOneBitAdam::probes() const {
  const auto& options = static_cast<const pacer::OneBitAdamOptions&>(param_groups().front().options());
  return !frozen_at() && attempts() >= options.freeze_step().value() / 2;
}

pacer::GradientScope ProbingOneBitAdam::gradient_scope() const {
  return probes() ? pacer::GradientScope::rank : OneBitAdam::gradient_scope();
}

void ClippingRatio::attach(pacer::SessionParts& parts) {
  optimizer_ = dynamic_cast<ProbingOneBitAdam*>(parts.session_optimizer());
  pacer::require(optimizer_ != nullptr, "the hook clipping_ratio needs a ProbingOneBitAdam");
  parts_ = &parts;
}

void ClippingRatio::gradients_ready(const pacer::Progress& /*progress*/) {
  if (optimizer_->probes()) {
    probe();
  } else if (max_norm_ > 0 && optimizer_->frozen_at() && probes_ > 0) {
    parts_->guard()->clip_to(max_norm_ * sum_of_ratios_ / static_cast<double>(probes_));
  }
}

void ClippingRatio::probe() {
  const at::NoGradGuard no_grad;
  pacer::Communicator& world = parts_->world();
  std::vector<at::Tensor> gradients;
  const pacer::SessionOptimizer& optimizer = *optimizer_;
  for (const at::Tensor& parameter : optimizer.local_parameters()) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  const at::Tensor own = at::full({1}, sum_of_squares(gradients), at::kDouble);
  const at::Tensor all = at::empty({world.world_size()}, at::kDouble);
  world.all_gather_host(all, own).wait();
  world.all_reduce_coalesced(gradients).wait();
  // What is stored is W times the mean, and W cancels out. The same number on every rank.
  const double ratio = std::sqrt(all.sum().item<double>() / sum_of_squares(gradients));
  if (!std::isfinite(ratio)) return;  // the step will be skipped, or there is nothing to clip
  sum_of_ratios_ += ratio;
  ++probes_;
}

void ClippingRatio::save(pacer::NamedTensors& state) const {
  state["sum_of_ratios"] = at::scalar_tensor(sum_of_ratios_, at::kDouble);
  state["probes"] = at::scalar_tensor(probes_, at::kLong);
}
void ClippingRatio::load(const pacer::NamedTensors& state) {
  sum_of_ratios_ = pacer::require_tensor(state, "sum_of_ratios").item<double>();
  probes_ = pacer::require_tensor(state, "probes").item<int64_t>();
}

}  // namespace convergence
