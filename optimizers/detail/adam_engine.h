// One step of FusedAdam, FusedAdamW and FusedLamb, from parameter groups to kernel launches. The engine keeps
// a plan (dtype tables, slots) and each step only checks that it still fits: parameters where they were,
// state untouched by others, the same set of gradients. All checks come before the first write. The three
// parts of a step are those of SessionOptimizer.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <pacer/optimizers/detail/adam_entry.h>
#include <pacer/optimizers/detail/adam_flavour.h>
#include <pacer/optimizers/detail/adam_slots.h>
#include <pacer/optimizers/detail/adam_table.h>
#include <pacer/optimizers/detail/parameter_check.h>
#include <pacer/optimizers/session_optimizer.h>

namespace pacer::detail {

class AdamEngine {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  using States = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

  explicit AdamEngine(const AdamFlavour& flavour) : flavour_(&flavour) {}

  // Checks, plans, creates missing state and sends what changed: every parameter that has a gradient will be
  // updated.
  void prepare(Groups& groups, States& states, const ParameterNames& names, const StepInputs& inputs);
  // Kernels only. False where the host saw gradients that are not finite. `has_looked`: the guard has seen
  // these gradients already, and found nothing.
  bool enqueue(bool has_looked = false);
  // *sum (on the device) = that of the stored gradients that take part, untouched where none does; between
  // prepare and enqueue.
  void sum_of_squares(double* sum);
  void conclude(bool applied);
  // As SessionOptimizer's. Fills the partial sums of these parameters, so that enqueue() only has to fold.
  bool look_early(const std::vector<at::Tensor>& parameters);

  // Counts the changes after which a captured enqueue() is out of date.
  int64_t enqueue_version() const { return enqueue_version_; }
  int64_t skipped_steps() const;
  // By which the parameter's update was last scaled; 1 where it was not, or the rule has no ratio.
  double trust_ratio(const at::Tensor& parameter) const;

 private:
  // A parameter of the optimizer in registration order, whether it has state yet or not.
  struct Member {
    const void* tensor;
    int64_t entry;  // -1: it never had a gradient
  };

  // A gradient whose partial sums are there.
  struct SeenGradient {
    c10::weak_intrusive_ptr<c10::TensorImpl> gradient;
    int64_t version;
  };

  void read_settings(const Groups& groups);
  bool plan_fits(const Groups& groups, const States& states);
  void plan(const Groups& groups, States& states, const ParameterNames& names);
  void add_entries(const Groups& groups, States& states, const ParameterNames& names);
  void create_states(States& states);
  void build_tables();

  void choose_guard(const StepInputs& inputs);
  void find_gradients();
  void gather_gradients();
  int64_t add_squares();
  // Whether look_early has seen every gradient as it is now; forgets what it saw.
  bool take_early_look();
  bool gradients_are_finite();

  const AdamFlavour* flavour_;
  std::vector<AdamGroupSettings> settings_;  // by group
  bool finite_check_ = false;

  at::Device device_ = at::kCPU;
  std::vector<size_t> group_sizes_;
  std::vector<Member> members_;
  std::vector<AdamEntry> entries_;
  std::vector<char> takes_part_;  // by entry
  std::vector<AdamTable> tables_;
  AdamSlots slots_;
  at::Tensor partials_;                               // double, for the norm
  std::vector<std::optional<SeenGradient>> seen_;     // by entry
  std::unordered_map<const void*, size_t> entry_of_;  // by TensorImpl
  bool can_look_early_ = false;               // the plan and its units are where the kernels need them
  std::shared_ptr<GradientGuard> own_guard_;  // for finite_check without a Session
  std::shared_ptr<GradientGuard> guard_;      // of this step
  double average_ = 1;
  int64_t enqueue_version_ = 0;
};

}  // namespace pacer::detail
