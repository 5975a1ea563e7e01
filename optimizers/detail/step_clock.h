// Counts the applied steps of parameters that are always stepped together. The host knows the count as long
// as it alone decides whether a step is applied; once the device decides (finite check, graph replay), the
// device leads and reading the count waits for it.
#pragma once

#include <cstdint>
#include <utility>

#include <ATen/core/Tensor.h>

namespace pacer::detail {

class StepClock {
 public:
  explicit StepClock(int64_t steps) : steps_(steps) {}

  int64_t read() const { return device_leads_ ? device_steps_.select(0, place_).item<int64_t>() : steps_; }
  bool device_leads() const { return device_leads_; }
  // The steps that the host has applied itself: all of them while it leads.
  int64_t host_steps() const { return steps_; }

  void advance_host() { ++steps_; }
  // Counts live in element `place` of `device_steps` (int64, on the GPU).
  void place_on_device(at::Tensor device_steps, int64_t place) {
    device_steps_ = std::move(device_steps);
    place_ = place;
  }
  // Copies this clock's count, which the device leads, into element `place` of another count tensor.
  void copy_device_count(const at::Tensor& device_steps, int64_t place) const {
    device_steps.select(0, place).copy_(device_steps_.select(0, place_), /*non_blocking=*/true);
  }
  void let_device_lead() { device_leads_ = true; }

 private:
  int64_t steps_;
  bool device_leads_ = false;
  at::Tensor device_steps_;
  int64_t place_ = 0;
};

}  // namespace pacer::detail
