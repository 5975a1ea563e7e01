// How much memory tensors take while a run trains: all that LibTorch's allocator hands out on one device, so
// weights, gradients, optimizer state and activations alike. On a CPU what other threads allocate is not
// seen.
//
//   const auto memory = std::make_shared<MemoryMeter>(device);
//   const c10::DebugInfoGuard counting(c10::DebugInfoKind::PROFILER_STATE, memory);
//   ...
//   memory->forget_peak();  one_step();  memory->peak();
#pragma once

#include <algorithm>
#include <cstdint>

#include <c10/core/Allocator.h>

namespace convergence {

class MemoryMeter : public c10::MemoryReportingInfoBase {
 public:
  explicit MemoryMeter(c10::Device device) : device_(device) {}

  // The most bytes since forget_peak() that tensors had at once, beyond what was there when counting began.
  int64_t peak() const { return peak_; }
  void forget_peak() { peak_ = now_; }

  bool memoryProfilingEnabled() const override { return true; }
  void reportMemoryUsage(void* /*where*/, int64_t bytes, size_t /*allocated*/, size_t /*reserved*/,
                         c10::Device device) override {
    if (device.type() != device_.type()) return;
    now_ += bytes;
    peak_ = std::max(peak_, now_);
  }

 private:
  c10::Device device_;
  int64_t now_ = 0, peak_ = 0;
};

}  // namespace convergence
