#include <pacer/core/error.h>

#include "gpu_time.h"

namespace nf4_bench {

std::string gpu_name() { return {}; }
bench::Spread time_on_gpu(const std::function<void()>&, const bench::Patience&) {
  throw pacer::Unavailable("this build has no CUDA; configure with PACER_CUDA=ON");
}

}  // namespace nf4_bench
