#include <pacer/schedulers/factor_lr.h>

#include <limits>

#include <pacer/core/error.h>
#include <pacer/optimizers/session_optimizer.h>

namespace pacer {

FactorLR::FactorLR(torch::optim::Optimizer& optimizer, const LearningRateSchedule& schedule)
    : LRScheduler(optimizer), schedule_(schedule) {
  require(
      !schedule.by_tokens(),
      "FactorLR learns nothing of tokens, so its schedule cannot have total_tokens, nor a part that begins "
      "at a token; give total_steps, or use the LearningRate hook of a Session");
  auto& groups = optimizer.param_groups();
  auto* own = dynamic_cast<SessionOptimizer*>(&optimizer);
  if (own) claim_ = own->claim_learning_rate("FactorLR");
  for (size_t g = 0; g < groups.size(); ++g) {
    base_lrs_.push_back(own ? own->base_lr(g) : groups[g].options().get_lr());
  }
  step();
}

void FactorLR::resume_at(int64_t steps) {
  constexpr int64_t kMost = std::numeric_limits<decltype(step_count_)>::max() - int64_t{2};
  require(steps >= 0 && steps <= kMost, "FactorLR cannot resume at step ", steps,
          "; it counts from 0 to 2^32 - 3");
  const auto before = step_count_;
  step_count_ = static_cast<decltype(step_count_)>(steps);
  try {
    step();
  } catch (...) {
    step_count_ = before;
    throw;
  }
}

// The base class counts the constructor's step too: step_count_ is the number of steps completed before the
// one whose rates it asks for.
std::vector<double> FactorLR::get_lrs() {
  const size_t groups = get_current_lrs().size();
  require(groups == base_lrs_.size(), "the optimizer has ", groups, " parameter groups, but had ",
          base_lrs_.size(), " when FactorLR was built; build FactorLR after the last group was added");
  Progress progress;
  progress.step = static_cast<int64_t>(step_count_);
  const double factor = schedule_.factor(progress);
  std::vector<double> rates;
  rates.reserve(base_lrs_.size());
  for (const double base : base_lrs_) rates.push_back(base * factor);
  return rates;
}

}  // namespace pacer
