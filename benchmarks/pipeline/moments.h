// When the parts of a step end, without a host that waits for them.
#pragma once

#include <chrono>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace bench::pipeline {

// On a GPU the moments are those at which its current stream comes to them.
class Moments {
 public:
  explicit Moments(c10::Device device) : device_(device) {}

  void mark() {
    if (device_.is_cpu()) {
      times_.push_back(Clock::now());
    } else {
      events_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
      events_.back().record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    }
  }
  // Between marks number `from` and `to`, once the device has done everything before them.
  double milliseconds(size_t from, size_t to) const {
    if (!device_.is_cpu()) return events_[from].elapsedTime(events_[to]);
    return std::chrono::duration<double, std::milli>(times_[to] - times_[from]).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  c10::Device device_;
  std::vector<Clock::time_point> times_;
  std::vector<c10::Event> events_;
};

}  // namespace bench::pipeline
