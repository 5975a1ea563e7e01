#include <pacer/collectives/detail/cuda_devices.h>

#include <cstring>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

namespace pacer::detail {

int cuda_device_count() { return static_cast<int>(c10::cuda::device_count()); }
std::array<int64_t, 2> cuda_device_id(int device) {
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  std::array<int64_t, 2> id{};
  static_assert(sizeof(id) == sizeof(properties.uuid));
  std::memcpy(id.data(), &properties.uuid, sizeof(id));
  return id;
}
void set_cuda_device(int device) { c10::cuda::set_device(static_cast<c10::DeviceIndex>(device)); }

}  // namespace pacer::detail
