// A build without CUDA: the CudaGraph hook refuses before this is reached.
#include <pacer/core/error.h>
#include <pacer/session/detail/step_graph.h>

namespace pacer::detail {

struct StepGraph::Graph {};

StepGraph::StepGraph() = default;
StepGraph::~StepGraph() = default;

bool StepGraph::enqueue(SessionOptimizer&, at::Device) {
  throw Unavailable(
      "this pacer was built without CUDA: configure it with -DPACER_CUDA=ON to use CUDA graphs");
}

}  // namespace pacer::detail
