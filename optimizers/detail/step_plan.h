// What a StepEngine knows beforehand of its steps: which parameters there are, where they and their states
// lie, which tables and step groups update them. A plan is made once (step_plan.cpp), and each step only
// checks that it still fits (step_walk.cpp): parameters where they were and as they were, state untouched by
// others, the same list.
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

#include <pacer/optimizers/detail/compressed_parameters.h>
#include <pacer/optimizers/detail/direction_exchange.h>
#include <pacer/optimizers/detail/dtype_table.h>
#include <pacer/optimizers/detail/entry_watch.h>
#include <pacer/optimizers/detail/optimizer_traits.h>
#include <pacer/optimizers/detail/parameter_check.h>
#include <pacer/optimizers/detail/parameter_entry.h>
#include <pacer/optimizers/detail/product_share.h>
#include <pacer/optimizers/detail/shared_norm.h>
#include <pacer/optimizers/detail/state_pager.h>
#include <pacer/optimizers/detail/step_groups.h>
#include <pacer/optimizers/session_optimizer.h>

namespace pacer::detail {

class StepPlan {
 public:
  explicit StepPlan(const OptimizerTraits& optimizer) : traits(&optimizer) {}

  // ---- What plans are made for. A plan that there is must be forgotten after a change. ----

  // See StepEngine::update_only.
  void update_only(const at::Tensor& parameter, ParameterRange range);
  const ParameterRanges& ranges() const { return ranges_; }
  // See StepEngine::share_norm_with.
  void share_norm_with(std::shared_ptr<Communicator> ranks) { ranks_ = std::move(ranks); }
  // See StepEngine::page.
  using MakePageDevice = std::function<std::unique_ptr<PageDevice>(at::Device)>;
  void page(const Paging& paging, MakePageDevice make);
  bool is_paged() const { return paging_.has_value(); }

  // ---- How a plan is made. ----

  // Nothing is left of a former plan then. Compressed parameters are entries without a gradient, too, where
  // `with_compressed`.
  void make(const ParamGroups& groups, ParamStates& states, const TensorNames& names, bool with_compressed);
  void forget();
  bool is_made() const { return !planned_groups_.empty(); }

  // ---- What a step compares, and what it finds. ----

  // Throws InvalidArgument where such a step cannot be paged.
  void check_paging(const StepInputs& inputs) const;
  enum class Fit {
    none,
    plan,                  // but which entries take part, or their step counts, may be others
    plan_and_step_groups,  // nothing changed but addresses of gradients
  };
  Fit fits(const ParamGroups& groups, const ParamStates& states, bool finds_gradients);
  bool takes_part(const ParameterEntry& entry, const at::Tensor& gradient) const;
  // Sorts the entries into step groups anew.
  void regroup();
  // Gives tables and CompressedParameters the gradients that fits() has left for later.
  void find_gradients();
  const void* find_gradient(size_t i, bool takes_part);
  // What stored gradients of local entries are multiplied with besides the average.
  double local_weight() const;
  // Throws InvalidArgument where ranks share parameters out, but not one that has a gradient.
  void require_shared_out() const;

  // The number of the parameter's entry; none where it has none.
  std::optional<size_t> find(const at::Tensor& parameter) const;
  // See StepEngine::compressed_variance_norm.
  double compressed_variance_norm() const;

  // ---- What a step works with. ----

  const OptimizerTraits* traits;
  std::vector<GroupSettings> settings;  // by group, of the step
  // They update compressed entries; null: tables do.
  std::unique_ptr<CompressedParameters> compressed_parameters;
  // Ranks make the directions of matrices together; null: each has those of added gradients.
  std::unique_ptr<DirectionExchange> directions;
  // Ranks share the products of matrices; null: each makes all of them.
  std::unique_ptr<ProductShare> products;
  std::unique_ptr<StatePager> pager;  // null until the first plan, and where state is not paged
  at::Device device = at::kCPU;
  std::vector<ParameterEntry> entries;
  std::vector<EntryWatch> watches;         // by entry
  std::vector<char> taking_part;           // by entry
  std::vector<size_t> compressed_entries;  // by position in the CompressedParameters
  std::vector<size_t> gapped;              // entries with a dense_parameter
  std::vector<DtypeTable> tables;
  StepGroups step_groups;
  at::Tensor partials;                      // double, for the norm
  std::unique_ptr<SharedNorm> shared_norm;  // instead, with ranks

 private:
  // A parameter of the optimizer in registration order, whether it has state yet or not.
  struct PlannedParameter {
    const void* tensor;
    std::optional<size_t> entry;  // none: it never had a gradient
  };

  // What the plan depends on in a group: the number of its parameters, and these options.
  struct PlannedGroup {
    size_t parameters;
    const kernels::UpdateLoops* loops;
    int64_t state_bits;
    bool amsgrad, averages_trust, is_compressed;
    MasterWeights master_weights;
    Rounding rounding;
    std::optional<MuonSettings> muon;

    bool operator==(const PlannedGroup& other) const {
      return parameters == other.parameters && loops == other.loops && state_bits == other.state_bits &&
             amsgrad == other.amsgrad && averages_trust == other.averages_trust &&
             is_compressed == other.is_compressed && master_weights == other.master_weights &&
             rounding == other.rounding && muon == other.muon;
    }
  };

  // States of torch's that users put among the optimizer's, as its own, by TensorImpl of the parameter.
  using AdoptedStates = std::vector<std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>>;
  // Whether ranks make the directions of these matrices together.
  bool exchanges(const GroupSettings& of_group) const { return directions != nullptr && of_group.muon; }
  // Optimizers that exchange more than gradients leave out what is frozen, even if it has a gradient.
  bool leaves_out_frozen() const { return traits->is_onebit || directions != nullptr; }
  AdoptedStates add_entries(const ParamGroups& groups, const ParamStates& states, const TensorNames& names,
                            bool with_compressed);
  ParameterEntry make_entry(const RegisteredParameter& parameter,
                            torch::optim::OptimizerParamState* state) const;
  void check_entries() const;
  void make_pager();
  void create_states(ParamStates& states);
  void build_tables();
  void share_sums();

  PlannedGroup planned(const ParamGroups& groups, size_t group) const;
  bool finds_states(const ParamStates& states);

  ParameterRanges ranges_;
  std::shared_ptr<Communicator> ranks_;
  std::optional<Paging> paging_;
  MakePageDevice make_page_device_;

  std::vector<PlannedGroup> planned_groups_;  // empty: there is no plan
  std::vector<PlannedParameter> planned_parameters_;
  std::unordered_map<const void*, size_t> entry_of_;  // by TensorImpl
  const void* states_end_ = nullptr;  // with state_buckets_, what tells tables of states apart
  uint64_t state_buckets_ = 0;
  std::vector<size_t> unsettled_;  // entries whose gradient is still to be found
};

}  // namespace pacer::detail
