// What LibTorch's allocator has taken of a GPU.
#pragma once

#include <c10/core/Device.h>

namespace sharding_bench {

// In GB (1e9 bytes), since start_memory_peaks.
struct MemoryPeaks {
  double allocated, reserved;
};

// Gives memory that is not in use back to the GPU, and forgets former peaks. Both functions throw
// pacer::Unavailable in a build without CUDA.
void start_memory_peaks(at::Device gpu);
MemoryPeaks memory_peaks(at::Device gpu);

}  // namespace sharding_bench
