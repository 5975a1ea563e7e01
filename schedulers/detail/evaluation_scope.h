// Evaluation mode with everything put back at the end: gradients off, every module in eval(), autocast as in
// training.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <pacer/schedulers/session_parts.h>

namespace pacer::detail {

class EvaluationScope {
 public:
  explicit EvaluationScope(SessionParts& parts) : parts_(parts) {
    remember(parts.model());
    for (const auto& module : parts.model().modules(/*include_self=*/false)) remember(*module);
    parts.model().eval();
    for (const auto& hook : parts.hooks()) hook->forward_begin(parts.progress);
  }
  EvaluationScope(const EvaluationScope&) = delete;
  ~EvaluationScope() {
    for (const auto& hook : parts_.hooks()) hook->forward_end();
    // Parents first, because train() reaches down.
    for (const auto& [module, training] : was_training_) {
      if (module->is_training() != training) module->train(training);
    }
  }

 private:
  void remember(torch::nn::Module& module) { was_training_.emplace_back(&module, module.is_training()); }

  SessionParts& parts_;
  at::NoGradGuard no_grad_;
  std::vector<std::pair<torch::nn::Module*, bool>> was_training_;
};

}  // namespace pacer::detail
