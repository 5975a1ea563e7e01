// A device as a bench waits for it, and what LibTorch's allocator has taken of a GPU.
#pragma once

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <torch/cuda.h>

#include "timing.h"

namespace bench {

// Returns once a GPU has done all that it was given; a CPU always has.
inline void synchronize(at::Device device) {
  if (device.is_cuda()) torch::cuda::synchronize(device.index());
}

// Returns how long `work` takes on the device, which is idle before and after.
template <class Work>
double milliseconds_of(at::Device device, const Work& work) {
  synchronize(device);
  const Stopwatch watch;
  work();
  synchronize(device);
  return watch.milliseconds();
}

// In GB (1e9 bytes), since start_memory_peaks.
struct MemoryPeaks {
  double allocated, reserved;
};

// Gives memory that is not in use back to the GPU, and forgets former peaks.
inline void start_memory_peaks(at::Device gpu) {
  at::globalContext().lazyInitDevice(gpu.type());
  at::getDeviceAllocator(gpu.type())->emptyCache();
  at::getDeviceAllocator(gpu.type())->resetPeakStats(gpu.index());
}

inline MemoryPeaks memory_peaks(at::Device gpu) {
  const auto stats = at::getDeviceAllocator(gpu.type())->getDeviceStats(gpu.index());
  const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return {static_cast<double>(stats.allocated_bytes[all].peak) * 1e-9,
          static_cast<double>(stats.reserved_bytes[all].peak) * 1e-9};
}

}  // namespace bench
