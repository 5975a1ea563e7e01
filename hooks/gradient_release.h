// Gradient release: a parameter is updated while backward runs, as soon as its gradient is whole, and the gradient's
// memory goes at once, so that never all gradients exist (Lv et al., arXiv:2306.09782, for SGD).
//
//   session.use(pacer::GradientRelease());
//
// Weights and state are those of the plain step to the bit. Session::backward takes the optimizer's part of the step,
// so schedules move before it and the optimizer counts the step at its end; Session::step does the rest. For
// FusedAdam, FusedAdamW, FusedSgd, FusedRmsprop, ScheduleFreeAdamW and rules of one's own on one rank, with one
// backward a step and nothing that must see all gradients first. docs/gradient-release.md says what is refused.
//
// Where backward fails half way, some parameters have taken the step and others have not. Session::backward then
// throws an Error that says how many; the others, the step's number and the schedules are as before the step.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>

#include <pacer/hooks/hook.h>

namespace pacer {

class GradientRelease : public Hook {
 public:
  GradientRelease();
  GradientRelease(GradientRelease&&) noexcept = default;
  ~GradientRelease() override;

  std::string hook_name() const override { return "gradient_release"; }
  Slot slot() const override { return Slot::optimize; }
  bool exclusive() const override { return true; }
  // Throws InvalidArgument for an optimizer that has no such step, and for more than one rank.
  void attach(SessionParts& parts) override;
  // Throws InvalidArgument where another hook, or a layer with sparse gradients, does not go with it.
  void arrange() override;
  void backward_begin(const Progress& progress) override;
  void backward_end(const Progress& progress) override;
  void backward_failed() override;

 private:
  struct Step;
  void follow_parameters();

  std::shared_ptr<Step> step_;
  SessionParts* parts_ = nullptr;
  std::unordered_map<const void*, at::Tensor> parameters_;  // with a hook, by TensorImpl
};

}  // namespace pacer
