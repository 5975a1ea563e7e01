// The few questions the engine asks of the CUDA runtime. In a build without CUDA each is an error that names
// the way out.
#pragma once

#include <c10/core/Device.h>

#include <pacer/kernels/stream.h>

namespace pacer::detail {

// The stream LibTorch currently enqueues on, for this device.
kernels::Stream current_stream(c10::Device device);

// True while that stream is being captured into a CUDA graph.
bool is_capturing(c10::Device device);

}  // namespace pacer::detail
