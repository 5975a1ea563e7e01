#include <pacer/schedulers/learning_rate.h>

#include <algorithm>
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
std::string next_factor_key(size_t group) { return std::string(kNextFactor) + '/' + std::to_string(group); }

}  // namespace

LearningRate& LearningRate::group(size_t number, const LearningRateSchedule& schedule) & {
  require(optimizer_ == nullptr, "LearningRate::group(", number,
          ") belongs before session.use, as ranks compare schedules when they begin; a rate that changes "
          "later is "
          "one of custom_schedule");
  of_groups_.insert_or_assign(number, schedule);
  return *this;
}

void LearningRate::attach(SessionParts& parts) {
  if (parts.session_optimizer())
    claim_ = parts.session_optimizer()->claim_learning_rate("the LearningRate hook");
  session_optimizer_ = parts.session_optimizer();
  optimizer_ = &parts.optimizer();
  progress_ = &parts.progress;
  warns_ = OnceOnFirstRank(parts.is_first_rank());
  read_base_rates();
  require(of_groups_.empty() || of_groups_.rbegin()->first < base_.size(),
          "LearningRate has a schedule for group ", of_groups_.empty() ? 0 : of_groups_.rbegin()->first,
          ", but the optimizer's ", base_.size(), " parameter groups count from 0");
}

const LearningRateSchedule& LearningRate::schedule_of(size_t group) const {
  const auto found = of_groups_.find(group);
  return found == of_groups_.end() ? schedule_ : found->second;
}

bool LearningRate::settled(const Progress& progress) const {
  return schedule_.warmup_ended(progress) &&
         std::all_of(of_groups_.begin(), of_groups_.end(),
                     [&](const auto& item) { return item.second.warmup_ended(progress); });
}

std::optional<int64_t> LearningRate::steps_until_zero() const {
  std::optional<int64_t> longest = schedule_.steps_until_zero();
  for (const auto& [group, schedule] : of_groups_) {
    const std::optional<int64_t> steps = schedule.steps_until_zero();
    longest = longest && steps ? std::max(longest, steps) : std::nullopt;
  }
  return longest;
}

// Of groups that are new since the last call.
void LearningRate::read_base_rates() {
  auto& groups = optimizer_->param_groups();
  for (size_t g = base_.size(); g < groups.size(); ++g) {
    base_.push_back(session_optimizer_ ? session_optimizer_->base_lr(g) : groups[g].options().get_lr());
  }
}

std::string LearningRate::agreement() const {
  std::string text = schedule_.describe();
  for (const auto& [group, schedule] : of_groups_) {
    text += detail::concatenate("; group ", group, ": ", schedule.describe());
  }
  return text;
}

void LearningRate::gradients_ready(const Progress& progress) {
  read_base_rates();
  auto& groups = optimizer_->param_groups();
  for (size_t g = 0; g < last_set_.size() && g < groups.size(); ++g) {
    const double lr = groups[g].options().get_lr();
    require(lr == last_set_[g], "the learning rate of parameter group ", g, " was changed from ",
            last_set_[g], " to ", lr,
            " although the LearningRate hook sets it; change the schedule, or leave the hook out");
  }
  const auto end = steps_until_zero();
  if (end && progress.step >= *end && warns_.take()) {
    TORCH_WARN(detail::concatenate(
        "the learning-rate schedule ended after ", *end,
        " steps, and steps beyond it train with a rate of 0; end the run there, or give the schedule more "
        "total_steps or an end_factor"));
  }
  std::vector<double> rates;
  for (size_t g = 0; g < groups.size(); ++g) rates.push_back(base_[g] * schedule_of(g).factor(progress));
  // From here on nothing throws, so that a step which is taken again finds all rates or none.
  last_set_ = std::move(rates);
  for (size_t g = 0; g < groups.size(); ++g) groups[g].options().set_lr(last_set_[g]);
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
  if (last_set_.empty()) return;
  report.add("learning_rate", last_set_.front());
  for (const auto& [group, schedule] : of_groups_) {
    if (group > 0) report.add("learning_rate/" + std::to_string(group), last_set_[group]);
  }
}

void LearningRate::save(NamedTensors& state) const {
  for (size_t g = 0; g < base_.size(); ++g) state[base_key(g)] = number_tensor(base_[g]);
  state[kNextFactor] = number_tensor(schedule_.factor(*progress_));
  for (const auto& [group, schedule] : of_groups_) {
    state[next_factor_key(group)] = number_tensor(schedule.factor(*progress_));
  }
}

void LearningRate::check_next_factor(const NamedTensors& state, const std::string& key,
                                     const LearningRateSchedule& schedule) const {
  const auto wanted = require_number<double>(state, key);
  const double factor = schedule.factor(*progress_);
  if (std::abs(factor - wanted) <= 1e-12) return;
  throw InvalidArgument(detail::concatenate(
      "the run to go on with would take step ", progress_->step + 1, " at ", wanted,
      " times the base rate, but the schedule of this LearningRate says ", factor, " (", schedule.describe(),
      "); a schedule may only change in what has not begun, so give the former one, or load the weights "
      "alone, with load_weights, and begin a new run"));
}

void LearningRate::load(const NamedTensors& state) {
  std::vector<double> base;
  for (size_t g = 0; g < base_.size(); ++g) {
    base.push_back(require_number<double>(state, base_key(g)));
    require(std::isfinite(base.back()) && base.back() >= 0, "\"", base_key(g), "\" of the state to load is ",
            base.back(), ", which is no learning rate");
  }
  // Older checkpoints lack some of them. A group whose checkpoint says nothing of its own followed the common schedule.
  if (state.count(kNextFactor) != 0) {
    check_next_factor(state, kNextFactor, schedule_);
    for (size_t g = 0; g < base_.size(); ++g) {
      const bool is_own = state.count(next_factor_key(g)) != 0;
      check_next_factor(state, is_own ? next_factor_key(g) : kNextFactor, schedule_of(g));
    }
  }
  base_ = std::move(base);
  last_set_.clear();
}

}  // namespace pacer
