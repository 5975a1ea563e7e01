#include <pacer/collectives/detail/cuda_devices.h>

#include <pacer/core/error.h>

namespace pacer::detail {

int cuda_device_count() { return 0; }
void set_cuda_device(int device) {
  throw Unavailable(concatenate("the GPU ", device, " cannot be used: this pacer was built without CUDA"));
}

}  // namespace pacer::detail
