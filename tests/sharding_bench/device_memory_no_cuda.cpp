#include "device_memory.h"

#include <pacer/core/error.h>

namespace sharding_bench {

void start_memory_peaks(at::Device /*gpu*/) { throw pacer::Unavailable("this build has no CUDA"); }
MemoryPeaks memory_peaks(at::Device /*gpu*/) { throw pacer::Unavailable("this build has no CUDA"); }

}  // namespace sharding_bench
