// Questions to the CUDA run-time library.
#include <cuda_runtime_api.h>

#include <cstring>

#include <pacer/core/error.h>
#include <pacer/kernels/stream.h>

namespace pacer::kernels {
namespace {

void require_success(cudaError_t error, const char* what) {
  require<DeviceError>(error == cudaSuccess, "cannot ask ", what, ": ", cudaGetErrorString(error));
}

}  // namespace

bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  require_success(cudaStreamIsCapturing(stream, &status), "a stream whether it is being captured");
  return status != cudaStreamCaptureStatusNone;
}

std::array<int64_t, 2> gpu_id(int gpu) {
  cudaDeviceProp properties{};
  require_success(cudaGetDeviceProperties(&properties, gpu), "a GPU for its number");
  std::array<int64_t, 2> id{};
  static_assert(sizeof(id) == sizeof(properties.uuid));
  std::memcpy(id.data(), &properties.uuid, sizeof(id));
  return id;
}

int compute_capability(int gpu) {
  int major = 0, minor = 0;
  require_success(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu),
                  "a GPU for its architecture");
  require_success(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu),
                  "a GPU for its architecture");
  return 10 * major + minor;
}

}  // namespace pacer::kernels
