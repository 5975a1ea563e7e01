#include "gpu_memory.h"

#include <pacer/core/error.h>

namespace qlora {

int64_t gpu_memory_in_use(at::Device /*gpu*/) { throw pacer::Unavailable("this build has no CUDA"); }
void limit_gpu_memory(at::Device /*gpu*/, int64_t /*bytes*/) {
  throw pacer::Unavailable("this build has no CUDA");
}

}  // namespace qlora
