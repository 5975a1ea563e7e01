// One step of FusedAdam and FusedAdamW, from parameter groups to kernel launches. The engine keeps a plan
// (dtype tables, slots) and each step only checks that it still fits: parameters where they were, state
// untouched by others, the same set of gradients. All checks come before the first write.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <pacer/optimizers/detail/adam_entry.h>
#include <pacer/optimizers/detail/adam_flavour.h>
#include <pacer/optimizers/detail/adam_slots.h>
#include <pacer/optimizers/detail/adam_table.h>
#include <pacer/optimizers/detail/parameter_check.h>

namespace pacer::detail {

class AdamEngine {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  using States = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

  explicit AdamEngine(const AdamFlavour& flavour) : flavour_(&flavour) {}

  // Updates every parameter that has a gradient; creates missing state.
  void step(Groups& groups, States& states, const ParameterNames& names);

  int64_t skipped_steps() const;

 private:
  // A parameter of the optimizer in registration order, whether it has state yet or not.
  struct Member {
    const void* tensor;
    int64_t entry;  // -1: it never had a gradient
  };

  void read_settings(const Groups& groups);
  bool plan_fits(const Groups& groups, const States& states);
  void plan(const Groups& groups, States& states, const ParameterNames& names);
  void add_entries(const Groups& groups, States& states, const ParameterNames& names);
  void create_states(States& states);
  void build_tables();

  void prepare_gradients();
  bool gradients_are_finite();
  void copy_back();

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
  at::Tensor partials_;  // double, for the norm
  at::Tensor check_;     // one kernels::GradientCheck, as bytes
};

}  // namespace pacer::detail
