#include <pacer/schedulers/gradient_accumulation.h>

#include <utility>

#include <pacer/core/error.h>
#include <pacer/schedulers/session_parts.h>

namespace pacer {

GradientAccumulation::GradientAccumulation(int64_t micro_steps) : micro_steps_(micro_steps) {
  // Draws of layer gates number micro-steps with 24 bits.
  require(micro_steps >= 1 && micro_steps < (int64_t{1} << 24),
          "GradientAccumulation needs between 1 and 2^24 - 1 micro-steps, not ", micro_steps);
}

GradientAccumulation& GradientAccumulation::weight_by_tokens(bool on) & {
  weight_by_tokens_ = on;
  return *this;
}
GradientAccumulation&& GradientAccumulation::weight_by_tokens(bool on) && {
  return std::move(weight_by_tokens(on));
}

void GradientAccumulation::attach(SessionParts& parts) {
  parts.micro_steps = micro_steps_;
  parts.weight_by_tokens = weight_by_tokens_;
}

}  // namespace pacer
