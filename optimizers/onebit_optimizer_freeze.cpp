// When a 1-bit optimizer freezes its variance, how, and what it says then.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <pacer/collectives/communicator.h>
#include <pacer/core/error.h>
#include <pacer/device/detail/host_copy.h>
#include <pacer/optimizers/detail/compressed_parameters.h>
#include <pacer/optimizers/detail/freeze_rule.h>
#include <pacer/optimizers/detail/onebit_overlap.h>
#include <pacer/optimizers/detail/onebit_settings.h>
#include <pacer/optimizers/detail/step_engine.h>
#include <pacer/optimizers/onebit_optimizer.h>

namespace pacer {
namespace {

// The mean of n squared gradients is off by a share of about sqrt(2 / n), and the length of a step, which
// goes with its inverse root, by 1 / sqrt(2 n): a tenth.
constexpr int64_t kEnoughGradients = 50;

// The number of steps that a mean with beta2 looks back on. Without that much rounding 0.9 would take 11.
int64_t window_of(double beta2) { return static_cast<int64_t>(std::ceil((1.0 - 1e-9) / (1.0 - beta2))); }

// The largest of 0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, ... that looks back on at most so many steps.
double largest_settled_beta2(int64_t steps) {
  double settled = 0;
  for (int64_t window = 1; window < 1'000'000'000; window *= 10) {
    for (const int64_t times : {1, 2, 5}) {
      if (times * window <= steps) settled = 1.0 - 1.0 / static_cast<double>(times * window);
    }
  }
  return settled;
}

}  // namespace

void OneBitOptimizer::consider_freeze() {
  const at::NoGradGuard no_grad;
  bool& is_due = warm_up_.freeze_is_due;
  if (onebit_->freeze_step()) {
    is_due = attempts_ >= *onebit_->freeze_step();
  } else {
    const bool look = warm_up_.rule->needs_norm(attempts_);
    const double norm = look ? engine().compressed_variance_norm() : 0;
    is_due = warm_up_.rule->is_due(attempts_, norm) || is_due;
  }
  if (!is_due) return;
  if (inputs_.freeze_allowed || onebit_->allow_early_freeze()) return freeze();
  postpone_freeze(
      "would",
      ", but a curriculum, the learning-rate warm-up or an option that it depends on still moves; it freezes "
      "once they have ended; set freeze_step behind their end, or allow_early_freeze(true) to freeze all the "
      "same");
}

void OneBitOptimizer::postpone_freeze(const char* may, const char* why) {
  if (std::exchange(warm_up_.freeze_was_postponed, true) || world_->rank() != 0) return;
  TORCH_WARN(detail::concatenate(name(), ": the variance ", may, " freeze after step ", attempts_, why));
}

// Parameters that no backward has reached take part, too, once the variance is frozen.
void OneBitOptimizer::freeze() {
  const auto settings = this->settings();
  engine().complete_compressed(param_groups_, settings, state_, names());
  auto parameters = std::make_unique<detail::CompressedParameters>(detail::onebit_tensors(view(), settings),
                                                                   *onebit_, shard_ranks_);
  if (!parameters->freeze(detail::onebit_states(view(), settings, state_), settings)) {
    return postpone_freeze(
        "cannot",
        ", because no gradient was ever other than zero; it freezes once one was; see that the loss "
        "depends on the parameters that are compressed, or give their groups compress(false)");
  }
  engine().compress_with(std::move(parameters));
  ahead_ = Ahead();
  frozen_at_ = attempts_;
  report_freeze();
}

// With bias correction the variance is a mean of all squares so far, each with nearly the same weight until
// they fill the window of beta2: what is missing is their number, and a shorter window does not add to it.
// Without, it has not grown to that mean yet.
void OneBitOptimizer::report_freeze() {
  const std::string floors = compressed()->describe_floors();
  if (world_->rank() != 0) return;
  const int64_t steps = *frozen_at_, window = window_of(onebit_->beta2);
  const int64_t enough = onebit_->bias_correction ? std::min(window, kEnoughGradients) : window;
  if (steps < enough) {
    const std::string advice = onebit_->freeze_step()
                                   ? detail::concatenate("; set freeze_step to ", enough, " or more")
                                   : std::string("; give freeze_automatically a longer run");
    if (onebit_->bias_correction) {
      TORCH_WARN(detail::concatenate(name(), " froze its variance after ", steps, " steps, and a mean of ",
                                     steps, " squared gradients is still noisy", advice));
    } else {
      const double grown = 100 * (1 - std::pow(onebit_->beta2, static_cast<double>(steps)));
      TORCH_WARN(detail::concatenate(
          name(), " froze its variance after ", steps,
          " steps, when without bias correction it had grown to ", std::lround(grown),
          " % of the mean of squared gradients (beta2 = ", onebit_->beta2, ")", advice,
          ", bias_correction(true), or the second of betas to ", largest_settled_beta2(steps), " or less"));
    }
  }
  if (!floors.empty()) {
    TORCH_WARN(detail::concatenate(
        name(), " froze its variance after step ", *frozen_at_, ": ", floors,
        "; the floor bounds their steps, those that had no gradient at all stay as they are, and where the "
        "loss rises after the freeze set freeze_step later, or give that parameter a group with "
        "compress(false)"));
  }
}

}  // namespace pacer
