// When a 1-bit optimizer freezes its variance, and what it says then.
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/gradient_bucketer.h>
#include <pacer/core/error.h>
#include <pacer/optimizers/detail/adam_engine.h>
#include <pacer/optimizers/detail/onebit_plan.h>
#include <pacer/optimizers/freeze_rule.h>
#include <pacer/optimizers/onebit_optimizer.h>

namespace pacer {
namespace {

// The largest of 0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, ... that looks back on at most so many steps.
double largest_settled_beta2(int64_t steps) {
  double settled = 0;
  for (double window = 1; window < 1e9; window *= 10) {
    for (const double times : {1.0, 2.0, 5.0}) {
      if (times * window <= static_cast<double>(steps)) settled = 1.0 - 1.0 / (times * window);
    }
  }
  return settled;
}

}  // namespace

void OneBitOptimizer::consider_freeze() {
  const at::NoGradGuard no_grad;
  if (plan_->freeze_step) {
    freeze_is_due_ = attempts_ >= *plan_->freeze_step;
  } else {
    const bool look = rule_->needs_norm(attempts_);
    const double norm = look ? engine().compressed_variance_norm() : 0;
    freeze_is_due_ = rule_->is_due(attempts_, norm) || freeze_is_due_;
  }
  if (!freeze_is_due_) return;
  if (inputs_.freeze_allowed || plan_->allow_early_freeze) return freeze();
  if (!std::exchange(freeze_was_postponed_, true) && world_->rank() == 0) {
    TORCH_WARN(
        name(), ": the variance would freeze after step ", attempts_,
        ", but a curriculum or the learning-rate warm-up still moves; it freezes once they have ended; set "
        "freeze_step behind their end, or allow_early_freeze(true) to freeze all the same");
  }
}

// Parameters that no backward has reached take part, too, once the variance is frozen.
void OneBitOptimizer::freeze() {
  const auto settings = this->settings();
  engine().complete_compressed(param_groups_, settings, state_, names());
  auto part = make_part(detail::onebit_tensors(view(), settings), *plan_);
  if (!part->freeze(detail::onebit_states(view(), settings, state_), settings)) {
    if (!std::exchange(freeze_was_postponed_, true) && world_->rank() == 0) {
      TORCH_WARN(name(), ": the variance cannot freeze after step ", attempts_,
                 ", because no gradient was ever other than zero; it freezes once one was; see that the loss "
                 "depends on the parameters that are compressed, or give their groups compress(false)");
    }
    return;
  }
  part_ = std::move(part);
  engine().compress_with(part_.get());
  frozen_at_ = attempts_;
  has_agreed_ = false;
  report_freeze();
}

void OneBitOptimizer::report_freeze() const {
  if (world_->rank() != 0) return;
  const double beta2 = plan_->beta2;
  constexpr double kRounding = 1e-9;  // 10 steps are enough for 0.9
  if (static_cast<double>(*frozen_at_) * (1.0 - beta2) < 1.0 - kRounding) {
    const auto steps = static_cast<int64_t>(1.0 / (1.0 - beta2) + 0.5);
    const auto advice = plan_->freeze_step ? detail::concatenate("set freeze_step to ", steps, " or more, or")
                                           : std::string("give freeze_automatically a longer run, or set");
    TORCH_WARN(name(), " froze its variance after ", *frozen_at_, " steps, but a mean with beta2 = ", beta2,
               " looks back on ", steps, ", so what it froze is still noisy; ", advice,
               " the second of betas to ", largest_settled_beta2(*frozen_at_), " or less");
  }
  const std::string floors = part_->describe_floors();
  if (!floors.empty()) {
    TORCH_WARN(
        name(), " froze its variance after step ", *frozen_at_, ": ", floors,
        "; the floor bounds their steps, and where the loss rises after the freeze set freeze_step later, "
        "or give that parameter a group with compress(false)");
  }
}

}  // namespace pacer
