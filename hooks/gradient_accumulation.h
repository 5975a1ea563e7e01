// Several forward and backward passes per optimizer step: a larger batch than fits in memory. The optimizer
// sees the mean over the micro-batches; an incomplete window at the end is stepped by Session::finish with
// the mean of what it has.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <pacer/hooks/hook.h>

namespace pacer {

namespace detail {
class WideGradients;
}  // namespace detail

class GradientAccumulation : public Hook {
 public:
  // micro_steps: passes per optimizer step, 1 ... 2^24 - 1.
  explicit GradientAccumulation(int64_t micro_steps);

  // Micro-batches count by their tokens (Session::begin, Session::count_tokens) instead of alike: the mean
  // over all tokens, for micro-batches of unequal size whose loss is a mean over tokens.
  GradientAccumulation& weight_by_tokens(bool on = true) &;
  GradientAccumulation&& weight_by_tokens(bool on = true) &&;

  // Gradients of bf16 and fp16 parameters add up in fp32, and are rounded once, with the window's last one.
  // It is the default, and costs 4 bytes for each element of these parameters in place of 2. In their own
  // dtype (`false`) sums of many micro-batches come out too small: those of 512 alike by half.
  GradientAccumulation& accumulate_in_fp32(bool on = true) &;
  GradientAccumulation&& accumulate_in_fp32(bool on = true) &&;

  std::string hook_name() const override { return "gradient_accumulation"; }
  Slot slot() const override { return Slot::loss; }
  void attach(SessionParts& parts) override;
  void arrange() override;
  std::string agreement() const override;
  void backward_begin(const Progress& progress) override;
  void backward_end(const Progress& progress) override;
  void backward_failed() override;
  void gradients_ready(const Progress& window) override;

 private:
  int64_t micro_steps_;
  bool weight_by_tokens_ = false;
  bool accumulate_in_fp32_ = true;
  const SessionParts* parts_ = nullptr;          // once attached
  std::shared_ptr<detail::WideGradients> wide_;  // where there is more than one micro-step
};

}  // namespace pacer
