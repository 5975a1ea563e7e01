#include <pacer/hooks/gradient_accumulation.h>

#include <pacer/core/error.h>
#include <pacer/hooks/detail/model_facts.h>
#include <pacer/hooks/detail/wide_gradients.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/step_report.h>

namespace pacer {

GradientAccumulation::GradientAccumulation(GradientAccumulationOptions options) : options_(options) {
  // Draws of layer gates number micro-steps with 24 bits.
  require(options_.micro_steps() >= 1 && options_.micro_steps() < (int64_t{1} << 24),
          "GradientAccumulation needs between 1 and 2^24 - 1 micro-steps, not ", options_.micro_steps());
  if (!options_.schedule()) return;
  options_.schedule()->validate();
  require(options_.micro_steps() == options_.schedule()->most(),
          "GradientAccumulation was given micro_steps and a schedule of them; give one of the two");
}

bool GradientAccumulation::settled(const Progress& progress) const {
  return !options_.schedule() || options_.schedule()->settled(progress);
}

void GradientAccumulation::attach(SessionParts& parts) {
  parts.micro_steps = options_.micro_steps();
  if (options_.schedule()) {
    parts.micro_steps_at = [schedule = *options_.schedule()](const Progress& progress) {
      return schedule.micro_steps(progress);
    };
  }
  parts.accumulates_gradients = true;
  parts.weight_by_tokens = options_.weight_by_tokens();
  parts.accumulate_in_fp32 = options_.accumulate_in_fp32();
  parts_ = &parts;
  if (options_.accumulate_in_fp32() && options_.micro_steps() > 1)
    wide_ = std::make_shared<detail::WideGradients>();
}

void GradientAccumulation::arrange() {
  if (wide_) wide_->watch(detail::trained_parameters(*parts_));
}

std::string GradientAccumulation::agreement() const {
  const std::string sums = options_.accumulate_in_fp32() ? "16-bit gradients add up in fp32"
                                                         : "gradients add up in their own dtype";
  return options_.schedule() ? options_.schedule()->describe() + ", " + sums : sums;
}

// Shards adds up what is shared out.
void GradientAccumulation::backward_begin(const Progress& progress) {
  if (!wide_ || parts_->gradients_are_shared_out || progress.micro_steps == 1) return;
  if (progress.micro_step == 0) wide_->watch(detail::trained_parameters(*parts_));
  progress.micro_step + 1 < progress.micro_steps ? wide_->begin_pass() : wide_->begin_last_pass();
}

void GradientAccumulation::backward_end(const Progress& /*progress*/) {
  if (wide_) wide_->end_pass();
}

void GradientAccumulation::backward_failed() {
  if (wide_) wide_->end_pass();
}

void GradientAccumulation::gradients_ready(const Progress& window) {
  if (wide_) wide_->round_the_rest();
  taken_ = window.micro_steps;
}

void GradientAccumulation::after_step(StepReport& report) {
  if (options_.schedule()) report.add("micro_steps", static_cast<double>(taken_));
}

}  // namespace pacer
