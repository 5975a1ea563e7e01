// Several forward and backward passes per optimizer step: a larger batch than fits in memory. The optimizer
// sees the mean over the micro-batches; an incomplete window at the end is stepped by Session::finish with
// the mean of what it has.
#pragma once

#include <cstdint>
#include <string>

#include <pacer/schedulers/hook.h>

namespace pacer {

class GradientAccumulation : public Hook {
 public:
  // micro_steps: passes per optimizer step, 1 ... 2^24 - 1.
  explicit GradientAccumulation(int64_t micro_steps);

  // Micro-batches count by their tokens (Session::begin, Session::count_tokens) instead of alike: the mean
  // over all tokens, for micro-batches of unequal size whose loss is a mean over tokens.
  GradientAccumulation& weight_by_tokens(bool on = true) &;
  GradientAccumulation&& weight_by_tokens(bool on = true) &&;

  std::string hook_name() const override { return "gradient_accumulation"; }
  Slot slot() const override { return Slot::loss; }
  void attach(SessionParts& parts) override;

 private:
  int64_t micro_steps_;
  bool weight_by_tokens_ = false;
};

}  // namespace pacer
