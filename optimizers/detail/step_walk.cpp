// What the host does in every step for every parameter: it compares all of it with the plan, and finds the
// gradient. Everything that is compared may have been changed between two steps.
#include <pacer/optimizers/detail/step_plan.h>

#include <numeric>

#include <ATen/ops/empty_strided.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

// More entries than these do not stay in a core's own cache, so that their memory is asked for ahead.
constexpr int64_t kCachedEntries = 1000;

}  // namespace

// A parameter without a gradient sits the step out, as in torch::optim; of a 1-bit optimizer also one that is
// frozen (requires_grad off). Compressed entries without a gradient take part all the same: ranks agree on
// their momentum, to which this rank then adds nothing.
bool StepPlan::takes_part(const ParameterEntry& entry, const at::Tensor& gradient) const {
  if (traits->is_onebit && !entry.parameter.requires_grad()) return false;
  return entry.is_compressed || gradient.defined();
}

StepPlan::PlannedGroup StepPlan::planned(const ParamGroups& groups, size_t group) const {
  const GroupSettings& of_group = settings[group];
  return {groups[group].params().size(), of_group.amsgrad,
          of_group.averages_trust,       compressed_parameters && of_group.compress,
          of_group.master_weights,       of_group.rounding};
}

StepPlan::Fit StepPlan::fits(const ParamGroups& groups, const ParamStates& states, bool finds_gradients) {
  if (groups.size() != planned_groups_.size() || (pager && !pager->fits())) return Fit::none;
  if (!finds_states(states)) return Fit::none;
  if (finds_gradients) unsettled_.clear();
  const bool is_onebit = traits->is_onebit;
  EntryWatch* const watch_of = watches.data();
  char* const parts = taking_part.data();
  const int64_t count = static_cast<int64_t>(watches.size());
  const bool is_long = count > kCachedEntries;
  bool step_groups_fit = true;
  const PlannedParameter* planned_parameter = planned_parameters_.data();
  for (size_t g = 0; g < groups.size(); ++g) {
    if (!(planned(groups, g) == planned_groups_[g])) return Fit::none;
    const bool has_compressed = planned_groups_[g].is_compressed;
    for (const at::Tensor& parameter : groups[g].params()) {
      const int64_t i = planned_parameter->entry;
      if (parameter.unsafeGetTensorImpl() != planned_parameter++->tensor) return Fit::none;
      const at::Tensor& own = gradient_of(parameter);
      const bool is_compressed = has_compressed && settings[g].compresses(parameter);
      if (i < 0) {
        if (own.defined() || is_compressed) return Fit::none;
        continue;
      }
      EntryWatch& watch = watch_of[i];
      if (is_long && i + 16 < count) {  // each needs what came with the one before
        watch_of[i + 16].fetch();
        watch_of[i + 8].fetch_gradient();
        watch_of[i + 4].fetch_elements();
      }
      if (!watch.is_registered(states)) return Fit::none;
      const void* elements = watch.gradient_of_unchanged(own);
      bool takes_part = elements != nullptr && (!is_onebit || parameter.requires_grad());
      if (elements == nullptr) {
        const ParameterEntry& entry = entries[static_cast<size_t>(i)];
        if (!watch.is_current(entry)) return Fit::none;
        takes_part = this->takes_part(entry, entry.gradient());
        if (finds_gradients && takes_part && own.defined()) check_gradient(parameter, own, entry.name);
      }
      step_groups_fit = step_groups_fit && step_groups.expects(watch.step_group, *watch.state, takes_part);
      parts[i] = takes_part;
      if (!finds_gradients) continue;
      if (elements != nullptr && takes_part && !is_compressed) {
        if (!watch.gradient_is_dense) watch.gradient_is_dense = true;
        tables[watch.table].set_gradient(watch.position, watch.step_group, elements);
      } else {
        unsettled_.push_back(static_cast<size_t>(i));
      }
    }
  }
  return step_groups_fit ? Fit::plan_and_step_groups : Fit::plan;
}

void StepPlan::regroup() {
  refuse_capture(device);
  step_groups.assign(entries, taking_part, device);
  for (size_t i = 0; i < entries.size(); ++i) watches[i].step_group = entries[i].step_group;
  unsettled_.resize(entries.size());
  std::iota(unsettled_.begin(), unsettled_.end(), size_t{0});
}

void StepPlan::require_shared_out() const {
  for (size_t i = 0; ranks_ && i < entries.size(); ++i) {
    require(!taking_part[i] || entries[i].own_gradient.defined(), "parameter ",
            InMessage{entries[i].name, entries[i].parameter.sizes()},
            " was not shared out between ranks, but has a gradient; freeze it, and clear the gradient");
  }
}

std::optional<size_t> StepPlan::find(const at::Tensor& parameter) const {
  const auto found = entry_of_.find(parameter.unsafeGetTensorImpl());
  return found == entry_of_.end() ? std::nullopt : std::optional(found->second);
}

// Writes down where the table has the states of all entries, where it is another than last time; elements of
// an unchanged one may still have moved. False where a state is missing.
bool StepPlan::finds_states(const ParamStates& states) {
  const void* end = states.end().current;
  if (end == states_end_ && states.bucket_count() == state_buckets_) return true;
  for (EntryWatch& watch : watches) {
    if (!watch.finds(states)) return false;
  }
  states_end_ = end;
  state_buckets_ = states.bucket_count();
  return true;
}

void StepPlan::find_gradients() {
  for (const size_t i : unsettled_) {
    const ParameterEntry& entry = entries[i];
    const void* elements = find_gradient(i, taking_part[i] != 0);
    if (entry.is_compressed) {
      compressed_parameters->set_tensor(entry, elements, settings[entry.group]);
    } else {
      tables[entry.table].set_gradient(entry.position, entry.step_group, elements);
    }
  }
}

// The address of a gradient for the kernels. One in another memory order is copied, here and not among the
// kernels, so that a captured step does not depend on where it lay.
const void* StepPlan::find_gradient(size_t i, bool takes_part) {
  static const at::Tensor kNone;
  ParameterEntry& entry = entries[i];
  const at::Tensor& gradient = takes_part ? entry.gradient() : kNone;
  const bool is_own = gradient.defined() && entry.own_gradient.defined();
  const bool is_dense = is_own || !gradient.defined() || !needs_dense_gradient(entry, gradient);
  watches[i].gradient_is_dense = is_dense;
  if (!is_dense) {
    if (!entry.dense_gradient.defined()) {
      entry.dense_gradient = at::empty_strided(entry.dense().sizes(), entry.dense().strides(),
                                               gradient.options().requires_grad(false));
    }
    entry.dense_gradient.copy_(gradient);
  }
  // Of a part without elements, too: LAMB's ratio is that of the whole tensor.
  const void* elements =
      is_own ? gradient.storage().data() : entry.in_range(is_dense ? gradient : entry.dense_gradient);
  if (is_own && entry.range.count > 0) elements = gradient.const_data_ptr();
  return elements;
}

}  // namespace pacer::detail
