// The optimizer's part of a step, for both kinds of optimizer: pacer's own, which get a factor and may be
// replayed from a CUDA graph, and any other, which gets finished gradients.
#pragma once

#include <memory>

#include <pacer/schedulers/session_parts.h>

namespace pacer::detail {

class StepGraph;

class StepRunner {
 public:
  explicit StepRunner(SessionParts& parts);
  ~StepRunner();

  // One optimizer step on gradients whose mean is `average` times what is stored.
  // `local_weight` as in StepInputs.
  void run(double average, double local_weight, bool freeze_allowed);

 private:
  void look_at_nothing(double average);
  void run_own(SessionOptimizer& optimizer, double average, double local_weight, bool freeze_allowed);
  void run_other(double average);
  // Gradients become their mean, unscaled and clipped. False where they are not finite.
  bool finish_gradients(double average);
  std::vector<at::Tensor> gradients() const;

  SessionParts& parts_;
  std::unique_ptr<StepGraph> graph_;
};

}  // namespace pacer::detail
