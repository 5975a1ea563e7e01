// One step of every optimizer here, in every phase, from parameter groups to kernel launches. The engine
// keeps a plan (entries, dtype tables, step groups) and each step only checks that it still fits: parameters
// where they were and as they were, state untouched by others, the same list. What no longer fits is planned
// anew, or refused, before the first write. The CompressedParameters of a 1-bit optimizer are one more part
// that the engine has and calls, as it has tables, from the freeze on. The three parts of a step are those of SessionOptimizer.
//
// To follow one AdamW step, read fused_optimizer.cpp (step), this file's source, kernels/cpu/adam.cpp or
// kernels/cuda/adam.cu, kernels/math/adam_storage.h and kernels/math/adam.h. Plans are made in step_plan.cpp,
// and compared with what is there in step_walk.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <pacer/device/detail/seen_tensor.h>
#include <pacer/optimizers/detail/compressed_parameters.h>
#include <pacer/optimizers/detail/dtype_table.h>
#include <pacer/optimizers/detail/entry_watch.h>
#include <pacer/optimizers/detail/optimizer_traits.h>
#include <pacer/optimizers/detail/parameter_check.h>
#include <pacer/optimizers/detail/parameter_entry.h>
#include <pacer/optimizers/detail/shared_norm.h>
#include <pacer/optimizers/detail/state_pager.h>
#include <pacer/optimizers/detail/step_groups.h>
#include <pacer/optimizers/session_optimizer.h>

namespace pacer::detail {

class StepEngine {
 public:
  explicit StepEngine(const OptimizerTraits& traits) : traits_(&traits) {}

  // Only these elements of the parameter, in memory order, are updated and have state. Its state, if there is
  // any, is of the range already.
  void own_range(const at::Tensor& parameter, OwnedRange owned);
  const OwnedRanges& owned_ranges() const { return ranges_; }
  // These ranks update the other ranges: the norm is that of all gradients, to the bit. Null: there are none.
  void share_norm_with(std::shared_ptr<Communicator> ranks) {
    ranks_ = std::move(ranks);
    forget_plan();
  }

  // From now on state is paged, on devices that `make` makes.
  using MakePageDevice = std::function<std::unique_ptr<PageDevice>(at::Device)>;
  void page(const Paging& paging, MakePageDevice make = make_page_device);
  bool is_paged() const { return paging_.has_value(); }
  // See FusedOptimizer::sync_state and FusedOptimizer::resident_state_bytes.
  void sync_state() {
    if (pager_) pager_->bring_home();
  }
  int64_t resident_state_bytes() const { return pager_ ? pager_->resident_bytes() : 0; }
  // See SessionOptimizer::expect_step.
  void expect_step();

  // Checks, plans, creates missing state and sends what changed: every parameter that has a gradient will be
  // updated. `settings` are those of the groups.
  void prepare(const ParamGroups& groups, std::vector<GroupSettings> settings, ParamStates& states,
               const TensorNames& names, const StepInputs& inputs);
  // Kernels only. False where the host saw gradients that are not finite.
  bool enqueue();
  void conclude(bool applied);
  // See SessionOptimizer::look_early. Fills the partial sums of these parameters, so that enqueue() only has
  // to fold.
  bool look_early(const std::vector<at::Tensor>& parameters);

  // States were replaced: nothing that the plan holds is valid any more.
  void forget_plan();

  // Makes a plan in which every parameter of a compressed group has state, whether it had a gradient or not.
  void complete_compressed(const ParamGroups& groups, std::vector<GroupSettings> settings,
                           ParamStates& states, const TensorNames& names);
  // Whether the plan fits the step to come, as far as that is known before its gradients are. The
  // CompressedParameters may then take up tensors as their gradients come: of those numbered [first, end)
  // prepare_ahead gives them the gradients, and returns the scalars of the coming step, by step group. Null
  // where these have to be planned anew. `local_weight` as theirs in that step.
  bool plan_fits_next_step(const ParamGroups& groups, std::vector<GroupSettings> settings,
                           const ParamStates& states);
  const kernels::StepScalars* prepare_ahead(double average, double local_weight, size_t first, size_t end);
  // From the next step on compressed entries belong to these; null: tables update all.
  void compress_with(std::unique_ptr<CompressedParameters> parameters);
  CompressedParameters* compressed_parameters() const { return compressed_parameters_.get(); }
  // The L1 norm of the bias-corrected variance of all compressed entries, added up in their order. Waits for
  // a GPU.
  double compressed_variance_norm() const;

  // Counts the changes after which a captured enqueue() is out of date.
  int64_t enqueue_version() const { return enqueue_version_; }
  int64_t skipped_steps() const;
  // Returns LAMB's trust ratio of the parameter's last update; 1 for other rules, before the first update,
  // and once the parameter is compressed.
  double trust_ratio(const at::Tensor& parameter) const;

 private:
  // A parameter of the optimizer in registration order, whether it has state yet or not.
  struct PlannedParameter {
    const void* tensor;
    int64_t entry;  // -1: it never had a gradient
  };

  // What the plan depends on in a group: the number of its parameters, and these options.
  struct PlannedGroup {
    size_t parameters;
    bool amsgrad, averages_trust, is_compressed;
    MasterWeights master_weights;
    Rounding rounding;

    bool operator==(const PlannedGroup& other) const {
      return parameters == other.parameters && amsgrad == other.amsgrad &&
             averages_trust == other.averages_trust && is_compressed == other.is_compressed &&
             master_weights == other.master_weights && rounding == other.rounding;
    }
  };

  bool takes_part(const ParameterEntry& entry, const at::Tensor& gradient) const;

  // ---- step_walk.cpp ----
  enum class Fit {
    none,
    plan,                  // but which entries take part, or their step counts, may be others
    plan_and_step_groups,  // nothing changed but addresses of gradients
  };
  Fit plan_fits(const ParamGroups& groups, const ParamStates& states, bool finds_gradients);
  bool finds_states(const ParamStates& states);
  PlannedGroup planned(const ParamGroups& groups, size_t group) const;
  void find_gradients();
  const void* find_gradient(size_t i, bool takes_part);

  // ---- step_plan.cpp ----

  // Compressed parameters are entries without a gradient, too, where `with_compressed`.
  void plan(const ParamGroups& groups, ParamStates& states, const TensorNames& names, bool with_compressed);
  // States of torch's that users put among the optimizer's, as its own, by TensorImpl of the parameter.
  using AdoptedStates = std::vector<std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>>;
  AdoptedStates add_entries(const ParamGroups& groups, const ParamStates& states, const TensorNames& names,
                            bool with_compressed);
  ParameterEntry make_entry(const RegisteredParameter& parameter,
                            torch::optim::OptimizerParamState* state) const;
  void check_entries() const;
  void create_states(ParamStates& states);
  void build_tables();
  void check_paging(const StepInputs& inputs) const;
  void make_pager();
  void share_sums();

  // ---- step_engine.cpp ----
  void prepare_step(const ParamGroups& groups, ParamStates& states, const TensorNames& names,
                    const StepInputs& inputs);
  void assign_step_groups();
  void choose_guard(const StepInputs& inputs);
  int64_t add_squares();
  void require_shared_out() const;
  bool gradients_are_finite();

  // Whether look_early has seen every gradient as it is now; forgets what it saw.
  bool take_early_look();
  void forget_seen();

  const OptimizerTraits* traits_;
  OwnedRanges ranges_;
  std::shared_ptr<Communicator> ranks_;
  std::vector<GroupSettings> settings_;                          // by group
  std::unique_ptr<CompressedParameters> compressed_parameters_;  // null before the freeze

  std::optional<Paging> paging_;
  MakePageDevice make_page_device_;
  std::unique_ptr<StatePager> pager_;  // null until the first plan

  at::Device device_ = at::kCPU;
  std::vector<PlannedGroup> planned_groups_;  // empty: there is no plan
  std::vector<PlannedParameter> planned_parameters_;
  std::vector<ParameterEntry> entries_;
  std::vector<EntryWatch> watches_;         // by entry
  std::vector<size_t> compressed_entries_;  // by position in the CompressedParameters
  std::vector<size_t> gapped_;              // entries with a dense_parameter
  const void* states_end_ = nullptr;        // with state_buckets_, what tells tables of states apart
  uint64_t state_buckets_ = 0;
  std::vector<char> takes_part_;   // by entry
  std::vector<size_t> unsettled_;  // entries whose gradient is still to be found
  std::vector<DtypeTable> tables_;
  StepGroups step_groups_;
  at::Tensor partials_;                               // double, for the norm
  std::unique_ptr<SharedNorm> shared_norm_;           // instead, with ranks
  std::vector<SeenTensor> seen_;                      // by entry: gradients whose partial sums are there
  bool has_seen_ = false;                             // any of them
  std::unordered_map<const void*, size_t> entry_of_;  // by TensorImpl
  bool can_look_early_ = false;  // the plan and its units are where the kernels need them
  DeviceBuffer<kernels::StepScalars> scalars_ahead_;
  std::shared_ptr<GradientGuard> own_guard_;  // for finite_check without a Session
  std::shared_ptr<GradientGuard> guard_;      // of this step
  double average_ = 1;
  int64_t enqueue_version_ = 0;
};

}  // namespace pacer::detail
