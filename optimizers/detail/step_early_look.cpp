#include <pacer/optimizers/detail/step_early_look.h>

#include <algorithm>
#include <utility>

#include <c10/core/DeviceGuard.h>

#include <pacer/device/detail/stream.h>

namespace pacer::detail {

bool EarlyLook::look(StepPlan& plan, const std::vector<at::Tensor>& parameters) {
  if (!is_allowed_) return false;
  const c10::DeviceGuard device_guard(plan.device);
  if (plan.device.is_cuda() && is_capturing(plan.device)) return false;
  std::vector<size_t> found;                      // entries
  std::vector<std::pair<size_t, size_t>> places;  // table, position
  for (const at::Tensor& parameter : parameters) {
    const std::optional<size_t> i = plan.find(parameter);
    const at::Tensor& gradient = gradient_of(parameter);
    if (!i || !gradient.defined() || gradient.is_inference()) return false;
    const ParameterEntry& entry = plan.entries[*i];
    if (!plan.takes_part(entry, gradient) || !plan.watches[*i].is_current(entry)) return false;
    check_gradient(parameter, gradient, entry.name);
    if (needs_dense_gradient(entry, gradient)) return false;
    found.push_back(*i);
    places.emplace_back(entry.table, entry.position);
  }
  has_seen_ = true;  // first: what is noted must be forgotten, also where this ends early
  seen_.resize(plan.entries.size());
  for (const size_t i : found) {
    const ParameterEntry& entry = plan.entries[i];
    const at::Tensor& gradient = gradient_of(entry.parameter);
    plan.tables[entry.table].set_gradient(entry.position, entry.step_group, entry.in_range(gradient));
    seen_[i] = SeenTensor(gradient);
  }
  std::sort(places.begin(), places.end());
  auto* partials = static_cast<double*>(plan.partials.mutable_data_ptr());
  size_t next = 0;
  for (size_t t = 0; t < plan.tables.size(); ++t) {
    DtypeTable& table = plan.tables[t];
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

bool EarlyLook::take(const StepPlan& plan) {
  bool has_all = is_allowed_ && has_seen_ && !(plan.device.is_cuda() && is_capturing(plan.device));
  for (size_t i = 0; has_all && i < plan.entries.size(); ++i) {
    const at::Tensor& gradient = gradient_of(plan.entries[i].parameter);
    has_all = plan.taking_part[i] && plan.watches[i].gradient_is_dense && gradient.defined() &&
              seen_[i].is_unchanged(gradient);
  }
  forget();
  return has_all;
}

void EarlyLook::forget() {
  if (has_seen_) seen_.clear();
  has_seen_ = false;
}

}  // namespace pacer::detail
