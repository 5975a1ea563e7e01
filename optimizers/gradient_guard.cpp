#include <pacer/optimizers/gradient_guard.h>

#include <cmath>
#include <cstddef>
#include <cstring>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sum.h>

#include <pacer/collectives/communicator.h>
#include <pacer/core/error.h>
#include <pacer/device/detail/stream.h>
#include <pacer/kernels/norm.h>

namespace pacer {
namespace {

using kernels::GradientCheck;

constexpr int64_t kCheckBytes = sizeof(GradientCheck);

at::Tensor field(const at::Tensor& memory, size_t offset, at::ScalarType type) {
  const auto size = static_cast<int64_t>(at::elementSize(type));
  return memory.narrow(0, static_cast<int64_t>(offset), size).view(type).select(0, 0);
}

}  // namespace

GradientGuard::GradientGuard(at::Device device) {
  require(device.is_cpu() || device.is_cuda(), "a gradient guard works on a CPU or CUDA device, not on ",
          device.str());
  if (device.is_cuda()) detail::refuse_capture(device);
  memory_ = at::empty({kCheckBytes}, at::TensorOptions().dtype(at::kByte).device(device));
  write(GradientCheck{});
}

void GradientGuard::clip_to(double max_norm, bool by_previous) {
  require(std::isfinite(max_norm) && max_norm > 0, "gradient clipping needs a finite max_norm > 0, not ",
          max_norm);
  rule_.max_norm = max_norm;
  clips_by_previous_ = by_previous;
  rule_changed_ = true;
}

void GradientGuard::scale_loss(const LossScaleRule& rule) {
  const auto within = [](double value, double low, double high) { return value >= low && value <= high; };
  require(within(rule.initial, kernels::kSmallestLossScale, kernels::kLargestLossScale),
          "the initial loss scale must be between 2^-14 and 3e38, not ", rule.initial);
  require(within(rule.growth_factor, 1, 1e6), "the loss scale's growth_factor must be from 1 to 1e+06, not ",
          rule.growth_factor);
  require(rule.backoff_factor > 0 && rule.backoff_factor < 1,
          "the loss scale's backoff_factor must be between 0 and 1, not ", rule.backoff_factor);
  require(rule.growth_interval > 0, "the loss scale's growth_interval must be at least 1 step, not ",
          rule.growth_interval);
  rule_.growth_factor = static_cast<float>(rule.growth_factor);
  rule_.backoff_factor = static_cast<float>(rule.backoff_factor);
  rule_.growth_interval = rule.growth_interval;
  rule_changed_ = true;
  GradientCheck check = read();
  check.loss_scale = static_cast<float>(rule.initial);
  write(check);
}

at::Tensor GradientGuard::loss_scale() const {
  return field(memory_, offsetof(GradientCheck, loss_scale), at::kFloat);
}

at::Tensor GradientGuard::factor() const {
  return field(memory_, offsetof(GradientCheck, factor), at::kDouble);
}

void GradientGuard::set_average(double average) {
  rule_changed_ = rule_changed_ || average != rule_.average;
  rule_.average = average;
  if (!rule_changed_ || device().is_cpu()) return;
  detail::refuse_capture(device());
  constexpr auto kBytes = static_cast<int64_t>(sizeof(rule_));
  if (!device_rule_.defined()) device_rule_ = at::empty({kBytes}, memory_.options());
  const at::Tensor pinned = at::empty({kBytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  std::memcpy(pinned.mutable_data_ptr(), &rule_, sizeof(rule_));
  device_rule_.copy_(pinned, /*non_blocking=*/true);
  rule_changed_ = false;
}

// Returns this rank's sum of squares and those of the others, in rank order.
at::Tensor GradientGuard::sums_of_ranks(const double* partials, int64_t count) const {
  const auto options = at::TensorOptions().dtype(at::kDouble).device(device());
  const at::Tensor own = at::from_blob(const_cast<double*>(partials), {count}, options).sum().view({1});
  at::Tensor all = at::empty({ranks_->world_size()}, options);
  ranks_->all_gather(all, own, CollectiveOptions().agreed(true)).wait();
  return all;
}

const double* GradientGuard::group_factor(size_t group) const {
  if (!group_factors_.defined() || group >= static_cast<size_t>(group_factors_.numel())) return nullptr;
  return group_factors_.const_data_ptr<double>() + group;
}

// Returns the same sums, of which the first becomes NaN where a factor is not finite.
at::Tensor GradientGuard::sums_with_factors(const double* partials, int64_t count) const {
  const auto options = at::TensorOptions().dtype(at::kDouble).device(device());
  at::Tensor sums = at::from_blob(const_cast<double*>(partials), {count}, options).clone();
  sums.select(0, 0).add_(group_factors_.sum().mul(0));
  return sums;
}

void GradientGuard::look(const double* partials, int64_t count) {
  at::Tensor checked, sums;
  if (group_factors_.defined() && count > 0) {
    checked = sums_with_factors(partials, count);
    partials = checked.const_data_ptr<double>();
  }
  if (ranks_ && ranks_->world_size() > 1) {
    sums = sums_of_ranks(partials, count);
    partials = sums.const_data_ptr<double>();
    count = sums.numel();
  }
  if (device().is_cuda()) {
    const auto* rule = static_cast<const kernels::GuardRule*>(device_rule_.const_data_ptr());
    kernels::finish_check_cuda(partials, count, rule, check(), detail::current_stream(device()));
  } else {
    kernels::finish_check_cpu(partials, count, rule_, check());
  }
}

void GradientGuard::early_factor(const double* sum_of_squares, double local_weight, double workers,
                                 double* factor) const {
  const auto* check = static_cast<const GradientCheck*>(memory_.const_data_ptr());
  if (device().is_cuda()) {
    const auto* rule = static_cast<const kernels::GuardRule*>(device_rule_.const_data_ptr());
    kernels::early_factor_cuda(sum_of_squares, local_weight, workers, rule, check, factor,
                               detail::current_stream(device()));
  } else {
    kernels::early_factor_cpu(sum_of_squares, local_weight, workers, rule_, check, factor);
  }
}

GradientCheck GradientGuard::read() const {
  GradientCheck check;
  const at::Tensor host = memory_.cpu();
  std::memcpy(&check, host.const_data_ptr(), sizeof(check));
  return check;
}

void GradientGuard::write(const GradientCheck& check) {
  const at::Tensor host = at::empty({kCheckBytes}, at::kByte);
  std::memcpy(host.mutable_data_ptr(), &check, sizeof(check));
  memory_.copy_(host);
}

}  // namespace pacer
