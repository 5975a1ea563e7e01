#include <pacer/optimizers/detail/entry_watch.h>

namespace pacer::detail {

EntryWatch::Place EntryWatch::place_of(const at::Tensor& tensor) {
  return {tensor.unsafeGetTensorImpl(), static_cast<const char*>(tensor.const_data_ptr()), tensor.dtype(),
          static_cast<uint16_t>(tensor.element_size())};
}

EntryWatch::EntryWatch(const AdamEntry& entry)
    : tensor(entry.parameter.unsafeGetTensorImpl()),
      state(entry.state),
      table(entry.table),
      position(entry.position),
      is_plain_(!entry.is_part && !entry.dense_parameter.defined() && entry.range.count > 0),
      device_(entry.parameter.device()),
      elements_(entry.parameter.numel()) {
  place_[0] = place_of(entry.values());
  for (size_t i = 0; i < kStateFieldCount; ++i) {
    state_tensors_[i] = (state->*kStateFields[i].read)();
    if (state_tensors_[i].defined()) place_[places_++] = place_of(state_tensors_[i]);
  }
}

bool EntryWatch::finds(const ParamStates& states) {
  const auto found = states.find(tensor);
  if (found == states.end()) return false;
  in_states_ = found.current;
  return found->second.get() == state;
}

bool EntryWatch::is_current(const AdamEntry& entry) const {
  if (!has_same_tensors() || entry.parameter.dtype() != place_[0].dtype) return false;
  if (entry.values().const_data_ptr() != place_[0].data) return false;
  for (int32_t i = 1; i < places_; ++i) {
    if (place_[i].tensor->data() != place_[i].data) return false;
  }
  if (entry.dense_parameter.defined()) return tensor->sizes() == entry.dense_parameter.sizes();
  if (entry.is_part) return tensor->is_contiguous() && tensor->numel() == elements_;
  return same_layout(entry.parameter, state->exp_avg_sq());
}

}  // namespace pacer::detail
