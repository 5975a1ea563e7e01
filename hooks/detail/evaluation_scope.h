// Evaluation mode with everything put back at the end: gradients off, every module in eval(), autocast as in
// training.
#pragma once

#include <exception>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <pacer/hooks/detail/forward_scope.h>

namespace pacer::detail {

// Every module in eval(), until the end.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& model) {
    was_training_.emplace_back(&model, model.is_training());
    for (const auto& module : model.modules(/*include_self=*/false)) {
      was_training_.emplace_back(module.get(), module->is_training());
    }
    model.eval();
  }
  EvaluationMode(const EvaluationMode&) = delete;
  ~EvaluationMode() {
    // Parents first, because train() reaches down.
    for (const auto& [module, training] : was_training_) {
      try {
        if (module->is_training() != training) module->train(training);
      } catch (const std::exception& error) {  // a train() of the user's
        TORCH_WARN("a module could not be put back to the mode it had before an evaluation: ", error.what());
      }
    }
  }

 private:
  std::vector<std::pair<torch::nn::Module*, bool>> was_training_;
};

class EvaluationScope {
 public:
  explicit EvaluationScope(SessionParts& parts)
      : mode_(parts.model()), counted_(parts.evaluations), forward_(parts) {}

 private:
  // How many of them there are, one inside the other.
  class Counted {
   public:
    explicit Counted(int64_t& count) : count_(++count) {}
    Counted(const Counted&) = delete;
    ~Counted() { --count_; }

   private:
    int64_t& count_;
  };

  EvaluationMode mode_;
  Counted counted_;
  at::NoGradGuard no_grad_;
  HooksForwardScope forward_;
};

}  // namespace pacer::detail
