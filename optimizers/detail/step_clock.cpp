#include <pacer/optimizers/detail/step_clock.h>

#include <utility>

namespace pacer::detail {

int64_t StepClock::read() const {
  return device_leads_ ? device_steps_.select(0, slot_).item<int64_t>() : steps_;
}

void StepClock::copy_device_count(const at::Tensor& device_steps, int64_t slot) const {
  device_steps.select(0, slot).copy_(device_steps_.select(0, slot_), /*non_blocking=*/true);
}

void StepClock::place_on_device(at::Tensor device_steps, int64_t slot) {
  device_steps_ = std::move(device_steps);
  slot_ = slot;
}

}  // namespace pacer::detail
