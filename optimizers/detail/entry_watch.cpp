#include <pacer/optimizers/detail/entry_watch.h>

namespace pacer::detail {

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

}  // namespace pacer::detail
