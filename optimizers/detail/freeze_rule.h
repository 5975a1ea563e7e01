// When the variance of a 1-bit optimizer freezes. A rule is told the norm of the variance after each step,
// the same number on every rank, and so decides alike on all of them.
#pragma once

#include <cstdint>
#include <vector>

namespace pacer::detail {

// Between ceil(0.15 P) and floor(0.30 P) steps of a planned P: the first step t > D at which the L1 norm of
// the bias-corrected variance is within 4 % of what it was D = round(1 / (1 - beta2)) steps ago (the rule of
// Tang et al., arXiv:2102.02888, section 4.1), else the window's last. The window, because the bare rule
// fires far too early where gradients are clipped, and hardly ever where they are not.
class FreezeRule {
 public:
  // Throws InvalidArgument for fewer than 4 planned steps.
  FreezeRule(int64_t planned_steps, double beta2);

  int64_t window_begin() const { return begin_; }
  int64_t window_end() const { return end_; }
  int64_t distance() const { return distance_; }
  // False where nobody will ask for the norm after `step` steps.
  bool needs_norm(int64_t step) const {
    return distance_ < end_ && step >= begin_ - distance_ && step <= end_;
  }
  // Call it once after each step, with the number of steps and the norm. Returns whether the rule lets the
  // variance freeze after this step, which from the window's end on it always does.
  bool is_due(int64_t step, double norm);

  // The norms it remembers, by step modulo their number, for checkpoints.
  const std::vector<double>& norms() const { return norms_; }
  // Throws InvalidArgument where they are not as many.
  void set_norms(std::vector<double> norms);

 private:
  int64_t begin_, end_, distance_;
  std::vector<double> norms_;
};

}  // namespace pacer::detail
