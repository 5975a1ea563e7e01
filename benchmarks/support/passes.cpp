#include "support/passes.h"

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/randint.h>
#include <torch/types.h>

#include "support/device.h"
#include "support/gpu_time.h"

namespace bench {
namespace {

constexpr Patience kOfPasses{25, 25, 60};
constexpr int kWarmUpPasses = 5;
constexpr double kSpinMilliseconds = 0.2;  // in which the host enqueues a few kernels

}  // namespace

Spread time_pass(at::Device device, const std::function<void()>& work) {
  for (int i = 0; i < kWarmUpPasses; ++i) work();
  if (device.is_cuda()) return time_enqueued(work, kSpinMilliseconds, kOfPasses);
  return repeat(kOfPasses, [&] { return milliseconds_of(device, work); });
}

namespace {

constexpr size_t kTurns = 4;  // of copies that do not find their memory in the cache

// Bytes read plus written per second by copies of so many numbers of 4 bytes that take turns.
double bandwidth_of_copies(at::Device device, int64_t count, size_t turns) {
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers;
  for (size_t i = 0; i < turns; ++i) {
    const at::Tensor from =
        at::randint(1, 1 << 30, {count}, at::TensorOptions().device(device).dtype(at::kInt));
    buffers.emplace_back(from, at::empty_like(from));
  }
  size_t turn = 0;
  const auto copy = [&] {
    const auto& [from, to] = buffers[turn++ % turns];
    if (device.is_cuda()) {
      to.copy_(from);
    } else {
      std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), static_cast<size_t>(count) * 4);
    }
  };
  return 8.0 * static_cast<double>(count) / (time_pass(device, copy).median * 1e-3);
}

}  // namespace

double copy_bandwidth(at::Device device, int64_t count_on_cpu) {
  return bandwidth_of_copies(device, device.is_cuda() ? int64_t{1} << 29 : count_on_cpu, 1);
}

double copy_bandwidth_of(at::Device device, double bytes) {
  return bandwidth_of_copies(device, std::llround(bytes / 8), kTurns);
}

}  // namespace bench
