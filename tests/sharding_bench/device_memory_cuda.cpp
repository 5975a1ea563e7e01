#include "device_memory.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>

namespace sharding_bench {

namespace allocator = c10::cuda::CUDACachingAllocator;

void start_memory_peaks(at::Device gpu) {
  at::globalContext().lazyInitDevice(at::kCUDA);
  allocator::emptyCache();
  allocator::resetPeakStats(gpu.index());
}

MemoryPeaks memory_peaks(at::Device gpu) {
  const auto stats = allocator::getDeviceStats(gpu.index());
  const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return {static_cast<double>(stats.allocated_bytes[all].peak) * 1e-9,
          static_cast<double>(stats.reserved_bytes[all].peak) * 1e-9};
}

}  // namespace sharding_bench
