#include <pacer/core/error.h>

#include "contenders.h"
#include "runs.h"

namespace bench::kernels {

std::string obstacle_to_cuda() { return "this build has no CUDA; configure with PACER_CUDA=ON"; }

std::vector<std::pair<std::string, std::string>> gpu_facts() { return {}; }

void run_on_cuda(const std::vector<Case>&, const Effort&, Report&) {
  throw pacer::Unavailable(obstacle_to_cuda());
}

Contender make_norm_on_cuda(const ModelData&) { throw pacer::Unavailable(obstacle_to_cuda()); }

}  // namespace bench::kernels
