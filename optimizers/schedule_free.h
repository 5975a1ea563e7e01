// ScheduleFreeAdamW (Defazio et al., arXiv:2405.15682): AdamW without a schedule. No step needs to know when
// training ends, because what is evaluated is an average of the weights at all times.
//
//   pacer::ScheduleFreeAdamW optimizer(model->parameters(), pacer::ScheduleFreeAdamWOptions(2.5e-3).warmup_steps(500));
//   ...
//   optimizer.eval();    // the model holds x, the average: to measure it, to save it
//   optimizer.train();   // it holds y again, to the bit: to go on
//
//   y = (1 - beta1) z + beta1 x        z -= lr u        x = (1 - c) x + c z        u = AdamW's update at y
//
// Steps move z, which lies where AdamW has its momentum; x is the average of all z, in which a step counts by
// its learning rate; gradients are taken at y, which the model holds in training. x is not stored: it is
// y + (1 - 1 / beta1) (z - y). So there are as many bytes as with FusedAdamW, but for a copy of y as long as
// the model holds x.
//
// A Session does both calls itself: around Session::evaluate, Validation, and the file of SaveBest. Its
// checkpoints hold y and the state. Everything else is as in fused_adam.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <pacer/optimizers/adam_param_state.h>
#include <pacer/optimizers/fused_optimizer.h>
#include <pacer/optimizers/schedule_free_options.h>

namespace pacer {

// AdamW whose weights are evaluated at their average.
class ScheduleFreeAdamW : public FusedOptimizerOf<ScheduleFreeAdamWOptions> {
 public:
  using FusedOptimizerOf::FusedOptimizerOf;

  // Puts x into the parameters, and keeps the bits of y. A parameter that has taken no step stays as it is. A
  // second call does nothing. Until train() steps, archives and the state by name are refused, because x does
  // not belong to the state; gradients that are taken at x are of no use.
  void eval();
  // Puts y back, whatever has been written into the parameters since eval(). At first the optimizer trains.
  void train();
  // False while the parameters hold x.
  bool is_training() const { return !was_asked_ && evaluations_ == 0; }

  // See FusedOptimizer. All three throw InvalidArgument while the parameters hold x.
  torch::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  NamedTensors export_state() const override;

  bool averages_weights() const override { return true; }
  // The same as eval() and train(), one inside the other: a Session calls them.
  void evaluation_begin() override;
  void evaluation_end() noexcept override;

 protected:
  void prepare(const StepInputs& inputs) override;
  PreparedImport prepare_import(const NamedTensors& state, const NamedTensors& rank_state) override;
  std::string unshared_reason(GradientScope among) const override;

 private:
  // A parameter that holds x, and its y.
  struct Kept {
    torch::Tensor parameter, weights;
  };
  void require_training(const char* what) const;
  void put_average();
  void put_weights_back() noexcept;

  std::vector<Kept> kept_;
  bool was_asked_ = false;  // eval()
  int64_t evaluations_ = 0;
};

}  // namespace pacer
