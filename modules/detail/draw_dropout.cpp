#include <pacer/modules/detail/draw_dropout.h>

#include <mutex>

#include <ATen/CPUGeneratorImpl.h>

#include <pacer/core/error.h>
#include <pacer/device/detail/stream.h>

namespace pacer::detail {

kernels::Dropout draw_dropout(double p, at::Device device) {
  if (p == 0) return {};
  require<Error>(device.is_cpu() || !is_capturing(device),
                 "dropout in a captured CUDA graph would drop the same elements in every replay; capture "
                 "without it, or leave the forward pass outside");
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return kernels::dropout_of(p, at::check_generator<at::CPUGeneratorImpl>(generator)->random64());
}

}  // namespace pacer::detail
