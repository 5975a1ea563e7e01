#include <pacer/device/detail/stream.h>

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace pacer::detail {
namespace {

c10::impl::VirtualGuardImpl gpus(c10::Device asked_for) {
  require<Unavailable>(
      PACER_WITH_CUDA != 0, "a tensor or rank is on ", asked_for,
      ", but this pacer was built without CUDA: configure it with -DPACER_CUDA=ON (a CUDA toolkit "
      "is needed) or stay on the CPU");
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA);
}

}  // namespace

int gpu_count() {
  if (PACER_WITH_CUDA == 0 || !c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return 0;
  return gpus({c10::DeviceType::CUDA, 0}).deviceCount();
}

void set_gpu(c10::Device gpu) { gpus(gpu).setDevice(gpu); }

kernels::Stream current_stream(c10::Device device) {
  return static_cast<kernels::Stream>(gpus(device).getStreamNativeHandle(gpus(device).getStream(device)));
}

bool is_capturing(c10::Device device) { return kernels::is_capturing(current_stream(device)); }

}  // namespace pacer::detail
