#include "gpu_memory.h"

#include <algorithm>

#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

#include <pacer/core/error.h>

namespace qlora {

namespace allocator = c10::cuda::CUDACachingAllocator;

int64_t gpu_memory_in_use(at::Device gpu) {
  const auto stats = allocator::getDeviceStats(gpu.index());
  return stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current;
}

void limit_gpu_memory(at::Device gpu, int64_t bytes) {
  allocator::emptyCache();
  size_t free = 0, total = 0;
  pacer::require<pacer::DeviceError>(cudaMemGetInfo(&free, &total) == cudaSuccess,
                                     "the size of the GPU's memory cannot be read");
  allocator::setMemoryFraction(std::min(1.0, static_cast<double>(bytes) / static_cast<double>(total)),
                               gpu.index());
}

}  // namespace qlora
