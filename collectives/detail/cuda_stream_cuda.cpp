#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <pacer/collectives/detail/cuda_stream.h>
#include <pacer/core/error.h>

namespace pacer::detail {

kernels::Stream current_stream(c10::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

bool is_capturing(c10::Device device) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(current_stream(device), &status);
  require<DeviceError>(error == cudaSuccess, "cannot ask the stream of ", device,
                       " whether it is being captured: ", cudaGetErrorString(error));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace pacer::detail
