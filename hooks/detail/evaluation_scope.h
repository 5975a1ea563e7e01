// Evaluation mode with everything put back at the end: gradients off, every module in eval(), the model as the
// optimizer and hooks have it in evaluation, autocast as in training.
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <pacer/hooks/detail/forward_scope.h>

namespace pacer::detail {

// Puts back at its end which modules are in training mode.
class ModesPutBack {
 public:
  explicit ModesPutBack(torch::nn::Module& model) {
    was_training_.emplace_back(&model, model.is_training());
    for (const auto& module : model.modules(/*include_self=*/false)) {
      was_training_.emplace_back(module.get(), module->is_training());
    }
  }
  ModesPutBack(const ModesPutBack&) = delete;
  ~ModesPutBack() {
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

// Every module in eval(), until the end.
class EvaluationMode : public ModesPutBack {
 public:
  explicit EvaluationMode(torch::nn::Module& model) : ModesPutBack(model) { model.eval(); }
};

// What the optimizer and hooks make of the model for an evaluation, without running it.
class HooksEvaluationScope {
 public:
  explicit HooksEvaluationScope(const SessionParts& parts)
      : optimizer_(parts.session_optimizer()), hooks_(parts.hooks()) {
    if (optimizer_ != nullptr) optimizer_->evaluation_begin();
    try {
      for (; begun_ < hooks_.size(); ++begun_) hooks_[begun_]->evaluation_begin();
    } catch (...) {
      end();
      throw;
    }
  }
  HooksEvaluationScope(const HooksEvaluationScope&) = delete;
  ~HooksEvaluationScope() { end(); }

 private:
  void end() noexcept {
    while (begun_ > 0) hooks_[--begun_]->evaluation_end();
    if (optimizer_ != nullptr) optimizer_->evaluation_end();
  }

  SessionOptimizer* const optimizer_;
  const std::vector<std::shared_ptr<Hook>>& hooks_;
  size_t begun_ = 0;
};

class EvaluationScope {
 public:
  explicit EvaluationScope(SessionParts& parts)
      : mode_(parts.model()), counted_(parts.evaluations), hooks_(parts), forward_(parts) {}
  // Ends the pass before the destructor does; throws what a forward_end has thrown.
  void end_pass() {
    forward_.end();
    forward_.throw_failure();
  }

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
  HooksEvaluationScope hooks_;
  HooksForwardScope forward_;
};

}  // namespace pacer::detail
