#include <pacer/hooks/cuda_graph.h>

#include <pacer/core/error.h>
#include <pacer/hooks/session_parts.h>

namespace pacer {

void CudaGraph::attach(SessionParts& parts) {
  require(parts.device().is_cuda(), "CudaGraph needs parameters on a GPU, but they are on ",
          parts.device().str(), "; leave the hook out");
  require(
      parts.session_optimizer() != nullptr,
      "CudaGraph works with pacer's optimizers only, because others wait for the host in their step; leave "
      "the hook out, or use FusedAdamW");
  parts.replay_optimizer = true;
}

}  // namespace pacer
