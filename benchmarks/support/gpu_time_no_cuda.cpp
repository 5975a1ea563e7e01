#include "gpu_time.h"

#include <pacer/core/error.h>

namespace bench {

std::string gpu_name() { return {}; }
Spread time_enqueued(const std::function<void()>&, double, const Patience&) {
  throw pacer::Unavailable("this build has no CUDA; configure with PACER_CUDA=ON");
}

}  // namespace bench
