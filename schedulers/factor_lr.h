// A learning-rate schedule for a loop without a Session, as a torch::optim::LRScheduler. Inside a Session the
// LearningRate hook does the same, counts skipped steps and tokens, and is saved with the rest.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/optim/schedulers/lr_scheduler.h>

#include <pacer/schedulers/learning_rate_schedule.h>

namespace pacer {

// Sets the rate of every parameter group to base rate * schedule.factor. The base rate is the group's
// initial_lr (pacer's optimizers, where it is set), else its rate when this is built; the constructor sets
// the first step's rate, which LibTorch's base does not. Call step() after every optimizer.step(). The
// optimizer must outlive it.
class FactorLR final : public torch::optim::LRScheduler {
 public:
  // Throws InvalidArgument for a schedule by tokens, of which a scheduler learns nothing, and where something
  // else already sets the rate of one of pacer's optimizers; the optimizer is unchanged then.
  FactorLR(torch::optim::Optimizer& optimizer, const LearningRateSchedule& schedule);
  FactorLR(const FactorLR&) = delete;

  // Calls of step() so far. This is all there is to save.
  int64_t steps() const { return static_cast<int64_t>(step_count_) - 1; }

  // Continues as if step() had been called `steps` times, and sets the rates. Build it for an optimizer that
  // has its base rates, not those of a checkpoint. Throws InvalidArgument for fewer than 0 or more than
  // 2^32 - 3 steps (LibTorch's counter has 32 bits).
  void resume_at(int64_t steps);

  // One per parameter group.
  const std::vector<double>& base_lrs() const { return base_lrs_; }

 private:
  std::vector<double> get_lrs() override;

  LearningRateSchedule schedule_;
  std::shared_ptr<const std::string> claim_;  // on the rate of one of pacer's optimizers
  std::vector<double> base_lrs_;
};

}  // namespace pacer
