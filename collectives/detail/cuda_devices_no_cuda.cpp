#include <pacer/collectives/detail/cuda_devices.h>

#include <pacer/core/error.h>

namespace pacer::detail {

namespace {

[[noreturn]] void refuse(int device) {
  throw Unavailable(concatenate("the GPU ", device, " cannot be used: this pacer was built without CUDA"));
}

}  // namespace

int cuda_device_count() { return 0; }
std::array<int64_t, 2> cuda_device_id(int device) { refuse(device); }
void set_cuda_device(int device) { refuse(device); }

}  // namespace pacer::detail
