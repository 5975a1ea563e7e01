// An update rule of your own, which pacer's machine runs: options, state, master weights, the gradient guard,
// paging, ranks, archives and checkpoints are those of FusedAdamW. What you write is what happens to one
// element (kernels/math/adam.h); the loops over it are templates of pacer's.
//
//   const pacer::kernels::UpdateLoops kLoops{pacer::kernels::elements_cpu<Lion>, lion_cuda};
//   const pacer::OwnRule kLion("Lion", kLoops, Lion::kSecondMoment);
//   pacer::OwnRuleOptimizer optimizer(model->named_parameters(), pacer::OwnRuleOptions(kLion, 1e-4));
#pragma once

#include <memory>

#include <pacer/optimizers/adam_param_state.h>
#include <pacer/optimizers/fused_optimizer.h>
#include <pacer/optimizers/optimizer_options.h>

namespace pacer {

namespace kernels {
struct UpdateLoops;
}  // namespace kernels

// Name, loops and state of a rule. It must outlive all options and optimizers that are made of it; mostly it
// is a constant of the program.
class OwnRule {
 public:
  // The name is that of the optimizer, in messages and in saved states, which no other rule can load. It and
  // the loops must live as long as the rule. `has_second_moment` is the rule's kSecondMoment; where it is
  // false, states have exp_avg only.
  OwnRule(const char* name, const kernels::UpdateLoops& loops, bool has_second_moment);
  OwnRule(const OwnRule&) = delete;
  OwnRule& operator=(const OwnRule&) = delete;

  const char* name() const { return name_; }
  const kernels::UpdateLoops& loops() const { return *loops_; }
  bool has_second_moment() const { return has_second_moment_; }
  // What the optimizer's base asks for.
  const detail::OptimizerTraits& traits() const { return *traits_; }

 private:
  const char* name_;
  const kernels::UpdateLoops* loops_;
  bool has_second_moment_;
  std::shared_ptr<const detail::OptimizerTraits> traits_;
};

// The options of a rule of your own: those that all optimizers without compression have. The rule reads them as
// AdamScalars, in which weight_decay is decoupled: AdamScalars::decay is lr * weight_decay, and step_size is lr,
// divided by 1 - beta1^t where bias_correction is on.
struct OwnRuleOptions : public FusedOptionsOf<OwnRuleOptions> {
  explicit OwnRuleOptions(const OwnRule& rule, double learning_rate = 1e-3) : rule_(&rule) {
    lr(learning_rate);
  }
  // The rule that they were made for.
  const OwnRule& rule() const { return *rule_; }

 private:
  const OwnRule* rule_;
};

// max_exp_avg_sq stays undefined, and exp_avg_sq where the rule has no second moment.
struct OwnRuleParamState : public CloneableStateFields<OwnRuleParamState> {};

// An optimizer with a rule of one's own; docs/own-optimizer.md shows one.
using OwnRuleOptimizer = FusedOptimizerOf<OwnRuleOptions>;

}  // namespace pacer
