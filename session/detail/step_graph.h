// The optimizer's kernels as a CUDA graph: captured once the launches are known to repeat, then replayed with
// one call. What changes from step to step (learning rate, clip factor, step count, addresses of gradients)
// is in device memory that prepare() refreshes, so it needs no new capture.
#pragma once

#include <cstdint>
#include <memory>

#include <pacer/optimizers/session_optimizer.h>

namespace pacer::detail {

class StepGraph {
 public:
  StepGraph();
  ~StepGraph();

  // Does what optimizer.enqueue() does, on the device's current stream. Between prepare and conclude.
  bool enqueue(SessionOptimizer& optimizer, at::Device device);

  // How often enqueue() replayed a graph.
  int64_t replays() const { return replays_; }

 private:
  struct Graph;
  std::unique_ptr<Graph> graph_;  // null until captured
  int64_t version_ = -1;          // of the optimizer when it was last enqueued
  int64_t replays_ = 0;
};

}  // namespace pacer::detail
