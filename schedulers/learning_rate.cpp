#include <pacer/schedulers/learning_rate.h>

#include <cmath>
#include <utility>

#include <c10/util/Exception.h>

#include <pacer/core/error.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/step_report.h>

namespace pacer {
namespace {

constexpr const char* kNextFactor = "next_factor";

std::string base_key(size_t group) { return "base/" + std::to_string(group); }

}  // namespace

void LearningRate::attach(SessionParts& parts) {
  if (parts.session_optimizer())
    claim_ = parts.session_optimizer()->claim_learning_rate("the LearningRate hook");
  session_optimizer_ = parts.session_optimizer();
  optimizer_ = &parts.optimizer();
  progress_ = &parts.progress;
  warns_ = OnceOnFirstRank(parts.is_first_rank());
  read_base_rates();
}

// Of groups that are new since the last call.
void LearningRate::read_base_rates() {
  auto& groups = optimizer_->param_groups();
  for (size_t g = base_.size(); g < groups.size(); ++g) {
    base_.push_back(session_optimizer_ ? session_optimizer_->base_lr(g) : groups[g].options().get_lr());
  }
}

std::string LearningRate::agreement() const { return schedule_.describe(); }

void LearningRate::gradients_ready(const Progress& progress) {
  read_base_rates();
  auto& groups = optimizer_->param_groups();
  for (size_t g = 0; g < last_set_.size() && g < groups.size(); ++g) {
    const double lr = groups[g].options().get_lr();
    require(lr == last_set_[g], "the learning rate of parameter group ", g, " was changed from ",
            last_set_[g], " to ", lr,
            " although the LearningRate hook sets it; change the schedule, or leave the hook out");
  }
  const double factor = schedule_.factor(progress);
  const auto end = schedule_.steps_until_zero();
  if (factor == 0 && end && progress.step >= *end && warns_.take()) {
    TORCH_WARN(detail::concatenate(
        "the learning-rate schedule ended after ", *end,
        " steps, and steps beyond it train with a rate of 0; end the run there, or give the schedule more "
        "total_steps or an end_factor"));
  }
  last_set_.resize(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    last_set_[g] = base_[g] * factor;
    groups[g].options().set_lr(last_set_[g]);
  }
}

void LearningRate::set_base_rates(const std::vector<double>& rates) {
  require(rates.size() == base_.size(), "LearningRate has ", base_.size(), " groups, but was given ",
          rates.size(), " base rates");
  for (const double rate : rates) {
    require(std::isfinite(rate) && rate >= 0, "LearningRate was given the base rate ", rate,
            "; a rate is finite and not negative");
  }
  base_ = rates;
  if (session_optimizer_) {
    for (size_t g = 0; g < rates.size(); ++g) session_optimizer_->set_base_lr(g, rates[g]);
  }
  last_set_.clear();
}

void LearningRate::after_step(StepReport& report) {
  if (!last_set_.empty()) report.add("learning_rate", last_set_.front());
}

void LearningRate::save(NamedTensors& state) const {
  for (size_t g = 0; g < base_.size(); ++g) state[base_key(g)] = number_tensor(base_[g]);
  state[kNextFactor] = number_tensor(schedule_.factor(*progress_));
}

void LearningRate::load(const NamedTensors& state) {
  std::vector<double> base;
  for (size_t g = 0; g < base_.size(); ++g) {
    base.push_back(require_number<double>(state, base_key(g)));
    require(std::isfinite(base.back()) && base.back() >= 0, "\"", base_key(g), "\" of the state to load is ",
            base.back(), ", which is no learning rate");
  }
  if (state.count(kNextFactor) != 0) {  // older checkpoints lack it
    const auto wanted = require_number<double>(state, kNextFactor);
    const double factor = schedule_.factor(*progress_);
    require(
        std::abs(factor - wanted) <= 1e-12, "the run to go on with would take step ", progress_->step + 1,
        " at ", wanted, " times the base rate, but the schedule of this LearningRate says ", factor, " (",
        schedule_.describe(),
        "); a schedule may only change in what has not begun, so give the former one, or load the weights "
        "alone, with load_weights, and begin a new run");
  }
  base_ = std::move(base);
  last_set_.clear();
}

}  // namespace pacer
