// The few questions the other folders ask of the CUDA runtime. In a build without CUDA each is an error that
// names the way out.
#pragma once

#include <c10/core/Device.h>

#include <pacer/core/error.h>
#include <pacer/kernels/stream.h>

namespace pacer::detail {

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
