#include <pacer/optimizers/schedule_free.h>

#include <exception>
#include <tuple>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/where.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/optimizer_view.h>
#include <pacer/optimizers/detail/remainder_values.h>

namespace pacer {
namespace {

// The value that steps read: with the digits of a remainder, or of a master copy as long as that rounds to the
// parameter. In fp64 or fp32.
torch::Tensor whole_value(const torch::Tensor& parameter, const FusedAdamStateFields& state) {
  if (parameter.scalar_type() == at::kDouble) return parameter;
  const torch::Tensor own = parameter.to(at::kFloat);
  if (state.master().defined()) {
    const torch::Tensor master = state.master().to(parameter.device());
    return at::where(master.to(parameter.scalar_type()).eq(parameter), master, own);
  }
  if (state.remainder().defined() && parameter.scalar_type() == at::kBFloat16) {
    return detail::joined_value(parameter, state.remainder().to(parameter.device()));
  }
  return own;
}

}  // namespace

void ScheduleFreeAdamW::require_training(const char* what) const {
  require(
      is_training(), traits().name, ": ", what,
      " belongs to the weights of training, but the parameters hold their average now; call train() first, "
      "or end the evaluation of the Session");
}

torch::Tensor ScheduleFreeAdamW::step(LossClosure closure) {
  require_training("step");
  return FusedOptimizer::step(std::move(closure));
}

void ScheduleFreeAdamW::save(torch::serialize::OutputArchive& archive) const {
  require_training("save");
  FusedOptimizer::save(archive);
}

void ScheduleFreeAdamW::load(torch::serialize::InputArchive& archive) {
  require_training("load");
  FusedOptimizer::load(archive);
}

NamedTensors ScheduleFreeAdamW::export_state() const {
  require_training("export_state");
  return FusedOptimizer::export_state();
}

void ScheduleFreeAdamW::prepare(const StepInputs& inputs) {
  require_training("step");
  FusedOptimizer::prepare(inputs);
}

SessionOptimizer::PreparedImport ScheduleFreeAdamW::prepare_import(const NamedTensors& state,
                                                                   const NamedTensors& rank_state) {
  require_training("import_state");
  return FusedOptimizer::prepare_import(state, rank_state);
}

std::string ScheduleFreeAdamW::unshared_reason(GradientScope /*among*/) const {
  return "in evaluation it makes whole parameters of their averages";
}

void ScheduleFreeAdamW::eval() {
  if (is_training()) put_average();
  was_asked_ = true;
}

void ScheduleFreeAdamW::train() {
  if (!was_asked_) return;
  was_asked_ = false;
  if (is_training()) put_weights_back();
}

void ScheduleFreeAdamW::evaluation_begin() {
  if (is_training()) put_average();
  ++evaluations_;
}

void ScheduleFreeAdamW::evaluation_end() noexcept {
  --evaluations_;
  if (is_training()) put_weights_back();
}

void ScheduleFreeAdamW::put_average() {
  const at::NoGradGuard no_grad;
  adopt_foreign_options();
  sync_state();
  try {
    for (const auto& group : param_groups_) {
      const auto& options = static_cast<const ScheduleFreeAdamWOptions&>(group.options());
      traits().settings(options);
      const double weight = 1 - 1 / std::get<0>(options.betas());
      for (const torch::Tensor& parameter : group.params()) {
        const auto found = state_.find(parameter.unsafeGetTensorImpl());
        if (found == state_.end()) continue;
        const auto* state = dynamic_cast<const FusedAdamStateFields*>(found->second.get());
        if (state == nullptr || !state->exp_avg().defined() || state->step() == 0) continue;
        const c10::DeviceGuard device_guard(parameter.device());
        const torch::Tensor y = whole_value(parameter, *state);
        const torch::Tensor z = state->exp_avg().to(y.options());
        const torch::Tensor x = z.sub(y).mul_(weight).add_(y);
        kept_.push_back({parameter, parameter.detach().clone()});
        parameter.copy_(x);
      }
    }
  } catch (...) {
    put_weights_back();
    throw;
  }
}

void ScheduleFreeAdamW::put_weights_back() noexcept {
  const at::NoGradGuard no_grad;
  for (Kept& one : kept_) {
    try {
      one.parameter.copy_(one.weights);
    } catch (const std::exception& error) {
      TORCH_WARN("the weights of training could not be put back into ", parameter_name(one.parameter),
                 " after an evaluation: ", error.what());
    }
  }
  kept_.clear();
}

}  // namespace pacer
