// A batch that grows while training goes on, as a pure function: progress in, micro-steps of a step out. It
// holds no state, so there is nothing to lose at resume.
//
//   session.use(pacer::GradientAccumulation(pacer::BatchSchedule(4).table({{1'000, 8}, {5'000, 16}})));
//   session.use(pacer::GradientAccumulation(pacer::BatchSchedule(4).doubling(250'000'000, 32).by_tokens()));
//
// Late in training the gradient of a small batch is mostly noise, and a larger one needs fewer steps for the
// same tokens (McCandlish et al., arXiv:1812.06162; Merrill et al., arXiv:2505.23971). The learning rate does
// not follow: with Adam it is often raised by the root of the batch's growth.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <pacer/hooks/progress.h>

namespace pacer {

// Setters chain. Each throws InvalidArgument, changing nothing, where its value is out of range or contradicts
// an earlier one.
class BatchSchedule {
 public:
  // {progress from which on it holds, micro-steps}
  using Table = std::vector<std::pair<int64_t, int64_t>>;

  // So many micro-steps at first, 1 ... 2^24 - 1.
  explicit BatchSchedule(int64_t first);

  // `first` before the first boundary, then what the last boundary reached says. Boundaries increase, and are
  // at least 1. The batch may become smaller, too.
  BatchSchedule& table(Table table);
  // Twice as many each time that so much more progress is made, until there are `last`, which is `first`
  // times a power of two.
  BatchSchedule& doubling(int64_t every, int64_t last);
  // Progress counts tokens trained, over all ranks, not steps.
  BatchSchedule& by_tokens();

  // Throws InvalidArgument where neither a table nor doubling was chosen.
  void validate() const;

  // For the step that comes next. Throws like validate().
  int64_t micro_steps(const Progress& progress) const;
  // The largest there is.
  int64_t most() const;
  // Whether the last change is behind.
  bool settled(const Progress& progress) const;
  // All of it in words and numbers: equal for equal schedules, different for others.
  std::string describe() const;

 private:
  BatchSchedule& become(Table table);
  int64_t position(const Progress& progress) const { return by_tokens_ ? progress.tokens : progress.step; }

  int64_t first_;
  Table table_;
  bool by_tokens_ = false;
};

}  // namespace pacer
