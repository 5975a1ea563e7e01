// A number of the run that follows a schedule: weight decay, a beta, momentum, or any number of the user's.
//
//   using Options = pacer::VaryOptions;
//   // Weight decay from 0.1 in the first step down to 0.01 after 10,000. Groups are named so that biases keep theirs.
//   session.use(pacer::Vary(Options("weight_decay").at_one(0.1).at_zero(0.01).groups({0}),
//                           pacer::warmup_cosine({0, 10'000})));
//   // Muon's momentum from 0.85 up to 0.95 over 300 steps, where it stays.
//   session.use(pacer::Vary(Options("momentum").at_zero(0.85).at_one(0.95), pacer::constant_schedule({300})));
//   // A number that the model reads.
//   session.use(pacer::Vary(Options("dropout").at_one(0.3).at_zero(0), pacer::warmup_linear({0, 10'000}),
//                           [&](double p) { model->dropout_p = p; }));
//
// The value is at_one where the factor of the schedule is 1, at_zero where it is 0, and on the line between them
// elsewhere. So a schedule that decays leads from at_one to at_zero, and a warm-up leads from at_zero to at_one:
// the ends are named by the factor and not by time, because most schedules go both ways.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/arg.h>

#include <pacer/hooks/hook.h>
#include <pacer/schedulers/learning_rate_schedule.h>

namespace torch::optim {
class Optimizer;
}

namespace pacer {

// What moves, and between which values. Setters chain.
struct VaryOptions {
  VaryOptions(std::string name) : name_(std::move(name)) {}  // NOLINT(google-explicit-constructor)
  // An option of the optimizer's parameter groups: weight_decay, beta1, beta2, eps, momentum and others. Which may
  // move depends on the optimizer; a name that may not is refused with those that may. With a function it is a
  // name of the user's. Metrics record the value by it.
  TORCH_ARG(std::string, name);
  // The value where the schedule's factor is 1: before a decay, after a warm-up. Needed, and finite.
  TORCH_ARG(std::optional<double>, at_one);
  // The value where the schedule's factor is 0: after a decay to 0, before a warm-up. Needed, and finite.
  TORCH_ARG(std::optional<double>, at_zero);
  // Only these parameter groups, by number. Empty: all whose rule reads the option, also those that were given
  // another value, as biases without weight decay. Not with a function.
  TORCH_ARG(std::vector<int64_t>, groups);
};

class Vary : public Hook {
 public:
  // Is called with the value.
  using Function = std::function<void(double)>;

  // Sets an option of the optimizer before each of its steps. Throws InvalidArgument for options that are missing or
  // cannot be.
  Vary(VaryOptions options, const LearningRateSchedule& schedule);
  // Calls the function when training starts, and before the forward pass of each micro-step. The value is the same
  // in all micro-steps of a step, and in a Pipeline. Between steps it stays, so that a validation sees that of the
  // step before it.
  Vary(VaryOptions options, const LearningRateSchedule& schedule, Function function);

  // "vary_NAME", and with groups "vary_NAME_of_0_2". So one number may follow two schedules in groups of its own.
  std::string hook_name() const override;
  Slot slot() const override { return Slot::schedule; }
  // Throws InvalidArgument where the optimizer has no such number or must not be given those values, and where
  // another Vary sets it in one of the groups.
  void attach(SessionParts& parts) override;
  std::string agreement() const override;
  // False until the schedule has ended where the number is weight_decay, beta1 or eps of a compressed group of
  // OneBitLamb: the mean trust ratio, which follows from them, is frozen with the variance. All other frozen
  // numbers do not depend on what moves. Of a function nobody knows what it does, and it is taken to be settled.
  bool settled(const Progress& progress) const override;
  void start(const Progress& progress) override;
  void forward_begin(const Progress& progress) override;
  // Throws InvalidArgument where somebody else changed the number since the last step.
  void gradients_ready(const Progress& progress) override;
  void after_step(StepReport& report) override;
  // The value of the step that comes next. What is loaded must have the same one, up to 1e-12 of the larger end, or
  // it is refused: a run that goes on may have other ends and another schedule in what has not begun.
  void save(NamedTensors& state) const override;
  void load(const NamedTensors& state) override;

  // The value for the step that comes after `progress.step` attempts: at_zero + (at_one - at_zero) * factor, and at
  // the ends of a schedule exactly at_one and at_zero.
  double value(const Progress& progress) const;
  const LearningRateSchedule& schedule() const { return schedule_; }

 private:
  struct Place {
    size_t group;
    double* value;  // in its options
    bool enters_freeze;
  };
  void check_options() const;
  void check_others(const SessionParts& parts) const;
  void check_optimizer() const;
  std::vector<Place> places() const;
  bool has_group(int64_t group) const;
  std::string said() const;
  // The name, and the groups where there are some.
  std::string full_name() const;

  VaryOptions options_;
  LearningRateSchedule schedule_;
  Function function_;
  torch::optim::Optimizer* optimizer_ = nullptr;
  const Progress* progress_ = nullptr;
  bool enters_freeze_ = false;
  std::optional<double> last_set_;      // none before the first step and after a load
  std::vector<size_t> groups_of_last_;  // in which it was set
};

}  // namespace pacer
