// The look at gradients ahead of the step: each parameter has its own places among the partial sums, so that
// it makes no difference when they are filled, nor by how many launches.
#include <algorithm>
#include <utility>

#include <c10/core/DeviceGuard.h>

#include <pacer/device/detail/stream.h>
#include <pacer/optimizers/detail/step_engine.h>

namespace pacer::detail {

bool StepEngine::look_early(const std::vector<at::Tensor>& parameters) {
  if (!can_look_early_) return false;
  const c10::DeviceGuard device_guard(device_);
  if (device_.is_cuda() && is_capturing(device_)) return false;
  std::vector<std::pair<size_t, size_t>> places;  // table, position
  for (const at::Tensor& parameter : parameters) {
    const auto found = entry_of_.find(parameter.unsafeGetTensorImpl());
    const at::Tensor& gradient = gradient_of(parameter);
    if (found == entry_of_.end() || !gradient.defined() || gradient.is_inference()) return false;
    const ParameterEntry& entry = entries_[found->second];
    if (!takes_part(entry, gradient) || !watches_[found->second].is_current(entry)) return false;
    check_gradient(parameter, gradient, entry.name);
    if (needs_dense_gradient(entry, gradient)) return false;
    places.emplace_back(entry.table, entry.position);
  }
  has_seen_ = true;  // first: what is noted must be forgotten, also where this ends early
  for (const at::Tensor& parameter : parameters) {
    const size_t i = entry_of_.at(parameter.unsafeGetTensorImpl());
    const at::Tensor& gradient = gradient_of(parameter);
    const ParameterEntry& entry = entries_[i];
    tables_[entry.table].set_gradient(entry.position, entry.step_group, entry.in_range(gradient));
    seen_[i] = SeenTensor(gradient);
  }
  std::sort(places.begin(), places.end());
  auto* partials = static_cast<double*>(partials_.mutable_data_ptr());
  size_t next = 0;
  for (size_t t = 0; t < tables_.size(); ++t) {
    DtypeTable& table = tables_[t];
    table.send_gradients();
    while (next < places.size() && places[next].first == t) {  // neighbours in one launch
      const size_t first = places[next].second;
      size_t count = 0;
      while (next < places.size() && places[next] == std::make_pair(t, first + count)) ++next, ++count;
      table.sum_of_squares(partials, first, count);
    }
    partials += table.norm_units();
  }
  return true;
}

bool StepEngine::take_early_look() {
  bool has_all = can_look_early_ && has_seen_ && !(device_.is_cuda() && is_capturing(device_));
  for (size_t i = 0; has_all && i < entries_.size(); ++i) {
    const at::Tensor& gradient = gradient_of(entries_[i].parameter);
    has_all = takes_part_[i] && watches_[i].gradient_is_dense && gradient.defined() &&
              seen_[i].is_unchanged(gradient);
  }
  forget_seen();
  return has_all;
}

void StepEngine::forget_seen() {
  if (has_seen_) seen_.assign(entries_.size(), SeenTensor());
  has_seen_ = false;
}

}  // namespace pacer::detail
