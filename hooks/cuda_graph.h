// Replays the optimizer's kernels from a CUDA graph: one call for the host instead of several launches.
// Learning rate, clip factor and addresses of gradients may change from step to step; a change of the
// parameters or options is noticed and captured anew. For pacer's optimizers on a GPU.
#pragma once

#include <string>

#include <pacer/hooks/hook.h>

namespace pacer {

class CudaGraph : public Hook {
 public:
  std::string hook_name() const override { return "cuda_graph"; }
  Slot slot() const override { return Slot::optimize; }
  bool exclusive() const override { return true; }
  // Throws InvalidArgument for another optimizer and for parameters that are not on a GPU.
  void attach(SessionParts& parts) override;
};

}  // namespace pacer
