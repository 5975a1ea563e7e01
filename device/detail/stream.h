// The GPUs of this process and the streams that LibTorch enqueues on, without headers of CUDA. In a build
// without CUDA each question about a GPU is an error that names the way out.
#pragma once

#include <c10/core/Device.h>

#include <pacer/core/error.h>
#include <pacer/kernels/stream.h>

namespace pacer::detail {

// How many GPUs this process sees; 0 without CUDA in this build or a driver on this machine.
int gpu_count();

// Makes the GPU the current one of this thread.
void set_gpu(c10::Device gpu);

// The stream LibTorch currently enqueues on, for this device.
kernels::Stream current_stream(c10::Device device);

// True while that stream is being captured into a CUDA graph.
bool is_capturing(c10::Device device);

// Throws Error while the device's current stream is captured: what the caller is about to enqueue (new state,
// tables) must happen once, not become part of a graph.
inline void refuse_capture(c10::Device device) {
  require<Error>(
      device.is_cpu() || !is_capturing(device),
      "the optimizer has to set up state or tables, which cannot be part of a CUDA graph (first step, new "
      "gradient addresses, options or parameters): take one step with the same gradients before the capture");
}

}  // namespace pacer::detail
