// How much memory tensors take while a run trains: all that LibTorch's allocator hands out on one device, so
// weights, gradients, optimizer state and activations alike. Peaks are those that the counting thread sees.
//
//   const auto memory = std::make_shared<MemoryMeter>(device);
//   const c10::DebugInfoGuard counting(c10::DebugInfoKind::PROFILER_STATE, memory);
//   ...
//   memory->forget_peak();  one_step();  memory->peak();
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

namespace convergence {

class MemoryMeter : public c10::MemoryReportingInfoBase {
 public:
  // From here on LibTorch counts on all threads: another one may free what this one has allocated.
  explicit MemoryMeter(c10::Device device) : device_(device) { FLAGS_caffe2_report_cpu_memory_usage = true; }

  // The most bytes since forget_peak() that tensors had at once, beyond what was there when counting began.
  int64_t peak() const { return peak_; }
  void forget_peak() { peak_ = now_; }

  bool memoryProfilingEnabled() const override { return true; }
  void reportMemoryUsage(void* /*where*/, int64_t bytes, size_t allocated, size_t /*reserved*/,
                         c10::Device device) override {
    if (device.type() != device_.type()) return;
    const auto all = static_cast<int64_t>(allocated);
    if (!before_) before_ = all - bytes;
    now_ = all - *before_;
    peak_ = std::max(peak_, now_);
  }

 private:
  c10::Device device_;
  std::optional<int64_t> before_;  // bytes that were there when counting began
  int64_t now_ = 0, peak_ = 0;
};

}  // namespace convergence
