// The mean loss of several steps, added up where the losses are, without waiting for a GPU.
#pragma once

#include <cstdint>
#include <utility>

#include <pacer/hooks/step_report.h>

namespace pacer::detail {

class LossMean {
 public:
  // Takes the step's mean loss; nothing where the report has none.
  void add(const StepReport& report) {
    if (!report.loss_sum().defined()) return;
    if (++steps_ == 1) {
      sum_ = report.loss_sum();
      average_ = report.loss_average();
      return;
    }
    // In fp64 from the second step on; a single one is kept as it is, at no cost.
    if (steps_ == 2) sum_ = sum_.to(at::kDouble).mul_(std::exchange(average_, 1.0));
    sum_.add_(report.loss_sum(), report.loss_average());
  }

  // Gives the report the mean over all steps taken so far, each counting alike, and begins anew.
  void move_to(StepReport& report) {
    if (steps_ == 0) return;
    report.set_loss(std::move(sum_), average_ / static_cast<double>(steps_));
    *this = {};
  }

 private:
  at::Tensor sum_;  // no dimensions; times average_ the sum of the steps' means
  double average_ = 1;
  int64_t steps_ = 0;
};

}  // namespace pacer::detail
