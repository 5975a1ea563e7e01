#include <pacer/session/detail/step_graph.h>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace pacer::detail {

struct StepGraph::Graph {
  at::cuda::CUDAGraph captured;
};

StepGraph::StepGraph() = default;
StepGraph::~StepGraph() = default;

bool StepGraph::enqueue(SessionOptimizer& optimizer, at::Device device) {
  const c10::cuda::CUDAGuard device_guard(device);
  const int64_t version = optimizer.enqueue_version();
  if (version != version_) {  // not known to repeat
    graph_.reset();
    version_ = version;
    return optimizer.enqueue();
  }
  if (graph_ == nullptr) {
    auto graph = std::make_unique<Graph>();
    const c10::cuda::CUDAStreamGuard stream_guard(c10::cuda::getStreamFromPool(false, device.index()));
    graph->captured.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    try {
      optimizer.enqueue();
    } catch (...) {
      graph->captured.capture_end();
      throw;
    }
    graph->captured.capture_end();
    graph_ = std::move(graph);
  }
  graph_->captured.replay();
  ++replays_;
  return true;
}

}  // namespace pacer::detail
