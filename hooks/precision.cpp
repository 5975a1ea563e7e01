#include <pacer/hooks/precision.h>

#include <cmath>

#include <utility>

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>

#include <pacer/core/error.h>
#include <pacer/files/number_text.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/step_report.h>
#include <pacer/kernels/math/gradient_guard.h>

namespace pacer {

Precision Precision::bf16() { return Precision(at::kBFloat16, std::nullopt); }
Precision Precision::fp8(const Fp8Options& options) {
  Precision precision = bf16();
  precision.fp8_ = options;
  return precision;
}
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
  if (fp8_) {
    scaling_ = std::make_shared<Fp8Scaling>(parts.model(), *fp8_, parts.device());
    parts.fp8_scaling = scaling_;
    parts_ = &parts;
    parts.guard();  // so that a step is skipped that must not move the scales
  }
  device_ = parts.device().type();
  if (!rule_) return;
  parts.guard()->scale_loss(*rule_);
  guard_ = parts.guard();
}

std::string Precision::agreement() const {
  if (fp8_) {
    return detail::concatenate(
        "fp8, ", fp8_->recipe() == Fp8Recipe::delayed ? "delayed" : "current", " scaling, history ",
        fp8_->amax_history(), fp8_->newest_only() ? ", newest" : ", largest", ", margin ", fp8_->margin(),
        fp8_->power_of_two() ? ", powers of two, " : ", ", c10::toString(fp8_->gradients()), ", but for ",
        fp8_->keep_first(), " first and ", fp8_->keep_last(), " last of its layers",
        fp8_->quantized_weights() ? ", weights in 4 bits among them" : "");
  }
  if (!rule_) return c10::toString(type_);
  return detail::concatenate(c10::toString(type_), ", loss scale ", exact_text(rule_->initial), ", times ",
                             exact_text(rule_->growth_factor), " after ", rule_->growth_interval,
                             " steps, times ", exact_text(rule_->backoff_factor), " after a bad one");
}

void Precision::start(const Progress&) {
  if (fp8_ && parts_->parameters_are_shared_out) scaling_->keep_weights(false);
}

// What was recorded outside of training, or in a window that was given up, says nothing of this step.
void Precision::begin(const Progress& progress, MicroBatch&) {
  if (!fp8_) return;
  if (progress.micro_step > 0) {
    scaling_->mark();
  } else if (!is_between_steps_) {
    scaling_->forget();
  }
}

void Precision::forward_begin(const Progress&) {
  before_.push_back({at::autocast::is_autocast_enabled(device_), at::autocast::get_autocast_dtype(device_),
                     Fp8Scope::current()});
  if (fp8_) {
    is_between_steps_ = false;
    Fp8Scope::set_current(scaling_);
  }
  at::autocast::set_autocast_enabled(device_, true);
  at::autocast::set_autocast_dtype(device_, type_);
  at::autocast::increment_nesting();
}

void Precision::forward_end() {
  if (before_.empty()) return;
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, before_.back().enabled);
  at::autocast::set_autocast_dtype(device_, before_.back().type);
  if (fp8_) Fp8Scope::set_current(std::move(before_.back().scaling));
  before_.pop_back();
}

at::Tensor Precision::scale_loss(at::Tensor loss) {
  return guard_ ? loss.to(at::kFloat) * guard_->loss_scale().clone() : loss;
}

// All ranks have the largest magnitudes of any.
void Precision::gradients_ready(const Progress&) {
  if (!fp8_ || parts_->world().world_size() == 1) return;
  const at::Tensor own = scaling_->amax();
  if (own.numel() == 0) return;
  const at::Tensor all = at::empty({parts_->world().world_size(), own.numel()}, own.options());
  parts_->world().all_gather(all.flatten(), own, CollectiveOptions().agreed(true)).wait();
  scaling_->set_amax(all.amax(0));
}

void Precision::after_step(StepReport& report) {
  if (!fp8_) return;
  scaling_->update(parts_->guard()->check());
  is_between_steps_ = true;
  const int64_t calls = scaling_->other_calls();
  report.add("calls_in_16_bits", static_cast<double>(calls - std::exchange(reported_calls_, calls)));
}

void Precision::save(NamedTensors& state) const {
  if (fp8_) {
    for (auto& [name, tensor] : scaling_->state()) state["fp8." + name] = tensor;
  }
  if (!guard_) return;
  const kernels::GradientCheck check = guard_->read();
  state["loss_scale"] = number_tensor(static_cast<double>(check.loss_scale));
  state["finite_steps"] = number_tensor(check.finite_steps);
}

void Precision::load(const NamedTensors& state) {
  if (fp8_) {
    NamedTensors scales;
    for (const auto& [name, tensor] : state) {
      require(name.rfind("fp8.", 0) == 0, "\"", name, "\" of the state to load is nothing of 8-bit scaling");
      scales[name.substr(4)] = tensor;
    }
    scaling_->set_state(scales);
  }
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
