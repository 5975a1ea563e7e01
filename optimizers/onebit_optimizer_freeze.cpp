// When a 1-bit optimizer freezes its variance, and what it says then.
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/gradient_bucketer.h>
#include <pacer/optimizers/detail/onebit_engine.h>
#include <pacer/optimizers/detail/onebit_flavour.h>
#include <pacer/optimizers/detail/onebit_groups.h>
#include <pacer/optimizers/freeze_rule.h>
#include <pacer/optimizers/onebit_optimizer.h>

namespace pacer {

void OneBitOptimizer::consider_freeze() {
  const at::NoGradGuard no_grad;
  if (plan_->freeze_step) {
    freeze_is_due_ = attempts_ >= *plan_->freeze_step;
  } else {
    const bool look = rule_->needs_norm(attempts_);
    const double norm = look ? detail::variance_norm(compressed_entries(state_), settings()) : 0;
    freeze_is_due_ = rule_->is_due(attempts_, norm) || freeze_is_due_;
  }
  if (!freeze_is_due_) return;
  if (inputs_.freeze_allowed || plan_->allow_early_freeze) return freeze();
  if (!std::exchange(freeze_was_postponed_, true) && world_->rank() == 0) {
    TORCH_WARN(
        name(), ": the variance would freeze after step ", attempts_,
        ", but a curriculum or the learning-rate warm-up still moves; it freezes once they have ended");
  }
}

void OneBitOptimizer::freeze() {
  make_missing_states();
  auto engine = make_engine(compressed_entries(state_), *plan_);
  if (!engine->freeze(settings())) {
    if (!std::exchange(freeze_was_postponed_, true) && world_->rank() == 0) {
      TORCH_WARN(name(), ": the variance cannot freeze after step ", attempts_,
                 ", because no gradient was ever other than zero; it freezes once one was");
    }
    return;
  }
  compressed_ = std::move(engine);
  frozen_at_ = attempts_;
  has_agreed_ = false;
  report_freeze();
}

void OneBitOptimizer::report_freeze() const {
  if (world_->rank() != 0) return;
  const double beta2 = detail::first_beta2(flavour(), param_groups_);
  if (static_cast<double>(*frozen_at_) * (1.0 - beta2) < 1.0) {
    TORCH_WARN(name(), " froze its variance after ", *frozen_at_, " steps, but a mean with beta2 = ", beta2,
               " looks back on ", static_cast<int64_t>(1.0 / (1.0 - beta2) + 0.5),
               "; what it froze is still noisy");
  }
  const std::string floors = compressed_->describe_floors();
  if (!floors.empty()) {
    TORCH_WARN(name(), " froze its variance after step ", *frozen_at_, ": ", floors);
  }
}

}  // namespace pacer
