// The optimizer's part of a step, for both kinds of optimizer: pacer's own, which get a factor and may be
// replayed from a CUDA graph, and any other, which gets finished gradients.
#pragma once

#include <memory>

#include <pacer/hooks/session_parts.h>

namespace pacer::detail {

class StepGraph;

class StepRunner {
 public:
  explicit StepRunner(SessionParts& parts);
  ~StepRunner();

  // Takes one optimizer step on the stored gradients. `inputs` are SessionParts::step_inputs().
  void run(StepInputs inputs);
  // Whether the step of an optimizer that is not pacer's threw, so that run() will call it once more, with
  // the gradients that it had.
  bool has_failed() const { return has_failed_; }

 private:
  // Shows the gradients to the guard.
  void look(const std::vector<at::Tensor>& gradients, double average);
  // Gradients become their mean, unscaled and clipped. False where they are not finite.
  bool finish_gradients(double average);
  void multiply(const GradientGuard& guard) const;
  std::vector<at::Tensor> gradients() const;

  SessionParts& parts_;
  std::unique_ptr<StepGraph> graph_;
  bool has_failed_ = false;
  bool are_finite_ = true;  // the gradients of the step that failed
};

}  // namespace pacer::detail
