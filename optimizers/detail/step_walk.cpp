// What the host does in every step for every parameter: it compares all of it with the plan, and finds the
// gradient. Everything that is compared may have been changed between two steps.
#include <pacer/optimizers/detail/step_plan.h>

#include <numeric>

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

// More entries than these do not stay in a core's own cache, so that their memory is asked for ahead.
constexpr size_t kCachedEntries = 1000;

template <class T>
void fetch_object(const T* object) {
  constexpr size_t kLine = 64;
  const char* begin = reinterpret_cast<const char*>(object);
  for (size_t offset = 0; offset < sizeof(T); offset += kLine) __builtin_prefetch(begin + offset);
  __builtin_prefetch(begin + sizeof(T) - 1);
}

}  // namespace

// ---- An entry. ----

EntryWatch::Place EntryWatch::place_of(const at::Tensor& tensor, bool has_layout) {
  return {tensor.unsafeGetTensorImpl(), static_cast<const char*>(tensor.const_data_ptr()), tensor.dtype(),
          static_cast<uint16_t>(tensor.element_size()), has_layout};
}

EntryWatch::EntryWatch(const ParameterEntry& entry)
    : tensor(entry.parameter.unsafeGetTensorImpl()),
      state(entry.state),
      table(entry.table),
      position(entry.position),
      is_plain_(!entry.range.is_part() && !entry.dense_parameter.defined() && entry.range.count > 0),
      device_(entry.parameter.device()),
      elements_(entry.parameter.numel()) {
  place_[0] = place_of(entry.values(), /*has_layout=*/false);
  for (size_t i = 0; i < kStateFieldCount; ++i) {
    state_tensors_[i] = (state->*kStateFields[i].read)();
    const at::Tensor& now = state_tensors_[i];
    if (now.defined()) place_[places_++] = place_of(now, same_layout(now, entry.memory));
  }
}

bool EntryWatch::finds(const ParamStates& states) {
  const auto found = states.find(tensor);
  if (found == states.end()) return false;
  in_states_ = found.current;
  return found->second.get() == state;
}

bool EntryWatch::is_current(const ParameterEntry& entry) const {
  if (!has_same_tensors() || entry.parameter.dtype() != place_[0].dtype) return false;
  if (entry.values().const_data_ptr() != place_[0].data) return false;
  int32_t i = 1;
  for (const at::Tensor& now : state_tensors_) {
    if (!now.defined()) continue;
    const Place& place = place_[i++];
    if (now.const_data_ptr() != place.data || (place.has_layout && !same_layout(now, entry.memory)))
      return false;
  }
  if (entry.dense_parameter.defined()) return tensor->sizes() == entry.dense_parameter.sizes();
  return !entry.range.is_part() || (tensor->is_contiguous() && tensor->numel() == elements_);
}

// The fields are written out, so that the compiler sees which they are.
inline bool EntryWatch::has_same_tensors() const {
  static_assert(kStateFieldCount == 9);
  const FusedAdamStateFields& now = *state;
  return now.exp_avg().is_same(state_tensors_[0]) && now.exp_avg_sq().is_same(state_tensors_[1]) &&
         now.max_exp_avg_sq().is_same(state_tensors_[2]) && now.master().is_same(state_tensors_[3]) &&
         now.remainder().is_same(state_tensors_[4]) && now.trust_average().is_same(state_tensors_[5]) &&
         now.row_moment().is_same(state_tensors_[6]) && now.exp_avg_scale().is_same(state_tensors_[7]) &&
         now.exp_avg_sq_scale().is_same(state_tensors_[8]);
}

inline const void* EntryWatch::gradient_of_unchanged(const at::Tensor& gradient) const {
  if (!is_plain_ || !has_same_tensors()) return nullptr;
  const at::IntArrayRef sizes = tensor->sizes();
  const bool is_contiguous = tensor->is_contiguous();
  const auto has_layout = [&](const c10::TensorImpl& other) {
    const at::IntArrayRef others = other.sizes();
    if (others.size() != sizes.size()) return false;
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (others[d] != sizes[d]) return false;
    }
    return (is_contiguous && other.is_contiguous()) || other.strides() == tensor->strides();
  };
  for (int32_t i = 0; i < places_; ++i) {
    const Place& place = place_[i];
    if (!place.is_left() || (place.has_layout && !has_layout(*place.tensor))) return nullptr;
  }
  const c10::TensorImpl& own = *gradient.unsafeGetTensorImpl();
  const c10::StorageImpl* storage = own.unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr || storage->device() != device_ || own.layout() != at::kStrided ||
      own.dtype() != place_[0].dtype || own.is_neg() || own._is_zerotensor() || !has_layout(own)) {
    return nullptr;
  }
  return data_of(own, place_[0].element_size);
}

inline void EntryWatch::fetch() const {
  fetch_object(state);
  __builtin_prefetch(in_states_);
  for (int32_t i = 0; i < places_; ++i) fetch_object(place_[i].tensor);
}
inline void EntryWatch::fetch_gradient() const {
  __builtin_prefetch(tensor->unsafe_storage().unsafeGetStorageImpl());
  fetch_object(tensor->grad().unsafeGetTensorImpl());
}
inline void EntryWatch::fetch_elements() const {
  __builtin_prefetch(tensor->grad().unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

// ---- All of them. ----

// Before a step, and before anything is changed.
void StepPlan::check_paging(const StepInputs& inputs) const {
  for (size_t g = 0; g < settings.size(); ++g) {
    require(!settings[g].paging || settings[g].paging == paging_, traits->name, ": the options of group ", g,
            paging_ ? " have another paged() than" : " have paged(), which lacks in",
            " those that the optimizer was made with; it is about the whole optimizer, so set it there");
  }
  const bool is_captured = pager && device.is_cuda() && is_capturing(device);
  require(
      !paging_ || !(inputs.replayable || is_captured), traits->name,
      ": paged state moves between host and GPU in every step, which a CUDA graph cannot replay; leave out "
      "the CudaGraph hook, or paged()");
}

// A parameter without a gradient sits the step out, as in torch::optim; of a 1-bit optimizer also one that is
// frozen (requires_grad off). Local entries without a gradient take part all the same: ranks agree on their
// momentum, or on a direction, to which this rank then adds no gradient.
bool StepPlan::takes_part(const ParameterEntry& entry, const at::Tensor& gradient) const {
  if (leaves_out_frozen() && !entry.parameter.requires_grad()) return false;
  return entry.is_local() || gradient.defined();
}

double StepPlan::local_weight() const {
  if (directions) return directions->local_weight();
  return compressed_parameters ? compressed_parameters->local_weight() : 1.0;
}

StepPlan::PlannedGroup StepPlan::planned(const ParamGroups& groups, size_t group) const {
  const GroupSettings& of_group = settings[group];
  return {groups[group].params().size(),
          of_group.loops,
          of_group.state_bits,
          of_group.amsgrad,
          of_group.averages_trust,
          compressed_parameters && of_group.onebit.compress(),
          of_group.master_weights,
          of_group.rounding,
          of_group.muon};
}

StepPlan::Fit StepPlan::fits(const ParamGroups& groups, const ParamStates& states, bool finds_gradients) {
  if (groups.size() != planned_groups_.size() || (pager && !pager->fits())) return Fit::none;
  if (!finds_states(states)) return Fit::none;
  if (finds_gradients) unsettled_.clear();
  const bool only_trained = leaves_out_frozen();
  EntryWatch* const watch_of = watches.data();
  char* const parts = taking_part.data();
  const size_t count = watches.size();
  const bool is_long = count > kCachedEntries;
  bool step_groups_fit = true;
  const PlannedParameter* planned_parameter = planned_parameters_.data();
  for (size_t g = 0; g < groups.size(); ++g) {
    if (!(planned(groups, g) == planned_groups_[g])) return Fit::none;
    const bool has_compressed = planned_groups_[g].is_compressed;
    for (const at::Tensor& parameter : groups[g].params()) {
      const std::optional<size_t> entry_of_it = planned_parameter->entry;
      if (parameter.unsafeGetTensorImpl() != planned_parameter++->tensor) return Fit::none;
      const at::Tensor& own = gradient_of(parameter);
      const bool is_compressed = has_compressed && settings[g].compresses(parameter);
      if (!entry_of_it) {
        if (own.defined() || is_compressed) return Fit::none;
        continue;
      }
      const size_t i = *entry_of_it;
      EntryWatch& watch = watch_of[i];
      if (is_long && i + 16 < count) {  // each needs what came with the one before
        watch_of[i + 16].fetch();
        watch_of[i + 8].fetch_gradient();
        watch_of[i + 4].fetch_elements();
      }
      if (!watch.is_registered(states)) return Fit::none;
      const void* elements = watch.gradient_of_unchanged(own);
      bool takes_part = elements != nullptr && (!only_trained || parameter.requires_grad());
      if (elements == nullptr) {
        const ParameterEntry& entry = entries[i];
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
        unsettled_.push_back(i);
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
    require(!taking_part[i] || entries[i].range.gradient.defined(), "parameter ",
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
  if (takes_part && entry.exchanged && !gradient.defined()) {
    entry.dense_gradient = at::zeros_like(entry.memory);
    watches[i].gradient_is_dense = false;
    return entry.dense_gradient.const_data_ptr();
  }
  const bool is_own = gradient.defined() && entry.range.gradient.defined();
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
