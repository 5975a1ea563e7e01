// Several forward and backward passes per optimizer step: a larger batch than fits in memory, or one that
// grows (batch_schedule.h). The optimizer
// sees the mean over the micro-batches; an incomplete window at the end is stepped by Session::finish with
// the mean of what it has.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <torch/arg.h>

#include <pacer/hooks/batch_schedule.h>
#include <pacer/hooks/hook.h>

namespace pacer {

namespace detail {
class WideGradients;
}  // namespace detail

struct GradientAccumulationOptions {
  GradientAccumulationOptions(int64_t micro_steps) : micro_steps_(micro_steps) {}
  GradientAccumulationOptions(const BatchSchedule& schedule)
      : micro_steps_(schedule.most()), schedule_(schedule) {}
  // Passes per optimizer step, 1 ... 2^24 - 1; with a schedule the most that there are.
  TORCH_ARG(int64_t, micro_steps);
  // How many they are as training goes on, where their number changes.
  TORCH_ARG(std::optional<BatchSchedule>, schedule);
  // Micro-batches count by their tokens (Session::begin, Session::count_tokens) instead of alike: the mean
  // over all tokens, for micro-batches of unequal size whose loss is a mean over tokens.
  TORCH_ARG(bool, weight_by_tokens) = false;
  // Gradients of bf16 and fp16 parameters add up in fp32, and are rounded once, with the window's last one.
  // It is the default, and costs 4 bytes for each element of these parameters in place of 2. In their own
  // dtype (`false`) sums of many micro-batches come out too small: those of 512 alike by half.
  TORCH_ARG(bool, accumulate_in_fp32) = true;
};

class GradientAccumulation : public Hook {
 public:
  // Throws InvalidArgument for options out of range.
  explicit GradientAccumulation(GradientAccumulationOptions options);

  std::string hook_name() const override { return "gradient_accumulation"; }
  Slot slot() const override { return Slot::loss; }
  // A 1-bit optimizer does not freeze while the batch still changes.
  bool settled(const Progress& progress) const override;
  void attach(SessionParts& parts) override;
  void arrange() override;
  std::string agreement() const override;
  void backward_begin(const Progress& progress) override;
  void backward_end(const Progress& progress) override;
  void backward_failed() override;
  void gradients_ready(const Progress& window) override;
  // With a schedule it reports `micro_steps` of the step.
  void after_step(StepReport& report) override;

 private:
  GradientAccumulationOptions options_;
  const SessionParts* parts_ = nullptr;          // once attached
  std::shared_ptr<detail::WideGradients> wide_;  // where there is more than one micro-step
  int64_t taken_ = 0;                            // micro-steps of the last step
};

}  // namespace pacer
