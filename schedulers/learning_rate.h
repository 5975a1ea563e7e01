// Sets the learning rate of every parameter group before each step: base rate times the schedule's factor.
// The base rate is the group's initial_lr; where that is unset, its lr when the hook is added to a Session.
//
//   session.use(pacer::LearningRate(pacer::warmup_cosine({1'000, 100'000})));
//   session.use(pacer::LearningRate(pacer::constant_schedule()).group(1, pacer::warmup_linear({0, 5'000})));
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pacer/hooks/hook.h>
#include <pacer/hooks/once_on_first_rank.h>
#include <pacer/schedulers/learning_rate_schedule.h>

namespace torch::optim {
class Optimizer;
}

namespace pacer {

class SessionOptimizer;

class LearningRate : public Hook {
 public:
  explicit LearningRate(const LearningRateSchedule& schedule) : schedule_(schedule) {}
  // The parameter group of that number, from 0, follows this schedule instead. Throws InvalidArgument once a Session has the
  // hook: ranks compare schedules when they begin.
  LearningRate& group(size_t number, const LearningRateSchedule& schedule) &;
  LearningRate&& group(size_t number, const LearningRateSchedule& schedule) && {
    return std::move(group(number, schedule));
  }

  std::string hook_name() const override { return "learning_rate"; }
  Slot slot() const override { return Slot::schedule; }
  bool exclusive() const override { return true; }
  // Throws InvalidArgument where a FactorLR already sets the rate of one of pacer's optimizers, and for a schedule of a
  // group that the optimizer does not have.
  void attach(SessionParts& parts) override;
  std::string agreement() const override;
  // Until all warm-ups are over.
  bool settled(const Progress& progress) const override;
  // Those of the schedule that goes on longest; none where one never ends.
  std::optional<int64_t> steps_until_zero() const override;
  // Throws InvalidArgument where somebody else changed a rate since the last step.
  void gradients_ready(const Progress& progress) override;
  void after_step(StepReport& report) override;
  // The base rate of each group of the optimizer. The schedule's factor multiplies them.
  std::vector<double> base_rates() const override { return base_; }
  // Throws InvalidArgument for another number of groups, and rates that are negative or not finite.
  void set_base_rates(const std::vector<double>& rates) override;
  const LearningRateSchedule& schedule() const { return schedule_; }
  const LearningRateSchedule& schedule_of(size_t group) const;
  // The base rates, and the factors of the step that comes next. What is loaded must have the same ones, up to
  // 1e-12, or it is refused: the schedule of a run that goes on may be another one in what has not begun.
  void save(NamedTensors& state) const override;
  void load(const NamedTensors& state) override;

 private:
  void read_base_rates();
  void check_next_factor(const NamedTensors& state, const std::string& key,
                         const LearningRateSchedule& schedule) const;

  LearningRateSchedule schedule_;
  std::map<size_t, LearningRateSchedule> of_groups_;  // that follow another one
  torch::optim::Optimizer* optimizer_ = nullptr;
  const Progress* progress_ = nullptr;
  SessionOptimizer* session_optimizer_ = nullptr;
  std::shared_ptr<const std::string> claim_;  // on the rate of one of pacer's optimizers
  std::vector<double> base_;
  std::vector<double> last_set_;  // empty before the first step and after a load
  OnceOnFirstRank warns_;
};

}  // namespace pacer
