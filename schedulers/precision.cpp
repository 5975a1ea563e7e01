#include <pacer/schedulers/precision.h>

#include <cmath>

#include <ATen/autocast_mode.h>

#include <pacer/core/error.h>
#include <pacer/schedulers/detail/number_text.h>
#include <pacer/schedulers/session_parts.h>

namespace pacer {

Precision Precision::bf16() { return Precision(at::kBFloat16, std::nullopt); }
Precision Precision::fp16(const LossScaleRule& rule) { return Precision(at::kHalf, rule); }

void Precision::attach(SessionParts& parts) {
  for (const auto& group : parts.optimizer().param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const at::ScalarType type = parameter.scalar_type();
      require(type == at::kFloat || type == at::kBFloat16, "Precision runs fp32 or bf16 parameters in ",
              c10::toString(type_), ", but a parameter of the optimizer is ", c10::toString(type),
              "; convert the model, or leave the hook out");
    }
  }
  device_ = parts.device().type();
  if (!rule_) return;
  parts.guard()->scale_loss(*rule_);
  guard_ = parts.guard();
}

std::string Precision::agreement() const {
  if (!rule_) return c10::toString(type_);
  return detail::concatenate(c10::toString(type_), ", loss scale ", detail::exact_text(rule_->initial),
                             ", times ", detail::exact_text(rule_->growth_factor), " after ",
                             rule_->growth_interval, " steps, times ",
                             detail::exact_text(rule_->backoff_factor), " after a bad one");
}

void Precision::forward_begin(const Progress&) {
  before_.push_back({at::autocast::is_autocast_enabled(device_), at::autocast::get_autocast_dtype(device_)});
  at::autocast::set_autocast_enabled(device_, true);
  at::autocast::set_autocast_dtype(device_, type_);
  at::autocast::increment_nesting();
}

void Precision::forward_end() {
  if (before_.empty()) return;
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, before_.back().enabled);
  at::autocast::set_autocast_dtype(device_, before_.back().type);
  before_.pop_back();
}

at::Tensor Precision::scale_loss(at::Tensor loss) {
  return guard_ ? loss.to(at::kFloat) * guard_->loss_scale().clone() : loss;
}

void Precision::save(NamedTensors& state) const {
  if (!guard_) return;
  const kernels::GradientCheck check = guard_->read();
  state["loss_scale"] = number_tensor(static_cast<double>(check.loss_scale));
  state["finite_steps"] = number_tensor(check.finite_steps);
}

void Precision::load(const NamedTensors& state) {
  if (!guard_) return;
  const auto scale = require_number<double>(state, "loss_scale");
  const auto finite_steps = require_number<int64_t>(state, "finite_steps");
  require(scale >= kernels::kSmallestLossScale && scale <= kernels::kLargestLossScale,
          "\"loss_scale\" of the state to load is ", scale, ", which no loss scale can be");
  require(finite_steps >= 0, "\"finite_steps\" of the state to load is ", finite_steps,
          ", which is no count");
  kernels::GradientCheck check = guard_->read();
  check.loss_scale = static_cast<float>(scale);
  check.finite_steps = finite_steps;
  guard_->write(check);
}

}  // namespace pacer
