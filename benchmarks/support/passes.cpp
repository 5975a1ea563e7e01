#include "support/passes.h"

#include <cstring>

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

double copy_bandwidth(at::Device device, int64_t count_on_cpu) {
  const int64_t count = device.is_cuda() ? int64_t{1} << 29 : count_on_cpu;
  const at::Tensor from =
      at::randint(1, 1 << 30, {count}, at::TensorOptions().device(device).dtype(at::kInt));
  const at::Tensor to = at::empty_like(from);
  const auto copy = [&] {
    if (device.is_cuda()) {
      to.copy_(from);
    } else {
      std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), static_cast<size_t>(count) * 4);
    }
  };
  return 8.0 * static_cast<double>(count) / (time_pass(device, copy).median * 1e-3);
}

}  // namespace bench
