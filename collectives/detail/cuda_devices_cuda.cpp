#include <pacer/collectives/detail/cuda_devices.h>

#include <c10/cuda/CUDAFunctions.h>

namespace pacer::detail {

int cuda_device_count() { return static_cast<int>(c10::cuda::device_count()); }
void set_cuda_device(int device) { c10::cuda::set_device(static_cast<c10::DeviceIndex>(device)); }

}  // namespace pacer::detail
