#include <pacer/optimizers/detail/step_groups.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>

#include <pacer/optimizers/gradient_guard.h>

namespace pacer::detail {

kernels::StepCount StepClock::read() const {
  if (!device_leads_) return count_;
  const at::Tensor row = device_counts_.select(0, place_).cpu();
  kernels::StepCount count;
  std::memcpy(&count, row.const_data_ptr(), sizeof count);
  return count;
}

void StepClock::advance_host(const kernels::RuleSettings& settings) {
  ++count_.steps;
  if (settings.rule != kernels::UpdateRule::schedule_free) return;
  kernels::StepScalars scalars;
  kernels::adam_scalars_cpu({settings, /*is_double=*/false, /*active=*/true}, count_.steps, scalars,
                            count_.average);
}

bool StepGroups::fit(const std::vector<ParameterEntry>& entries, const std::vector<char>& takes_part) {
  std::vector<char> active(groups_.size(), -1);
  for (size_t i = 0; i < entries.size(); ++i) {
    const ParameterEntry& entry = entries[i];
    if (!follows(*entry.state, entry.step_group)) return false;
    char& group = active[static_cast<size_t>(entry.step_group)];
    if (group == -1) group = takes_part[i];
    if (group != takes_part[i]) return false;
  }
  for (size_t s = 0; s < groups_.size(); ++s) groups_[s].takes_part = active[s] == 1;
  return !could_merge();
}

bool StepGroups::could_merge() const {
  if (groups_.size() < 2) return false;
  std::set<std::tuple<size_t, bool, bool, bool, int64_t, double, double>> seen;
  size_t unread = 0;
  for (size_t s = 0; s < groups_.size(); ++s) {
    const Group& group = groups_[s];
    if (group.clock->device_leads()) {
      ++unread;
    } else if (!seen.emplace(group.parameter_group, group.is_double, group.is_local, group.takes_part,
                             group.clock->host_steps(), group.clock->host_count().average.weight_sum,
                             group.clock->host_count().average.lr_max)
                    .second) {
      return true;
    }
  }
  return unread > most_unread_;
}

void StepGroups::assign(std::vector<ParameterEntry>& entries, const std::vector<char>& takes_part,
                        at::Device device) {
  // Entries meet in a step group if their counts are known to be equal: the same clock, or the same number.
  const bool reads_counts = std::exchange(reads_counts_, false) || groups_.size() > most_unread_;
  using Key = std::tuple<size_t, bool, bool, const StepClock*, int64_t, double, double, char>;
  std::map<Key, int64_t> group_of;
  std::vector<Group> groups;
  std::vector<std::shared_ptr<const StepClock>> origins;
  std::vector<int64_t> chosen(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    const ParameterEntry& entry = entries[i];
    const auto clock = entry.state->clock();
    const bool is_unread = device.is_cuda() && clock && clock->device_leads() && !reads_counts;
    kernels::StepCount count;
    if (!is_unread) count = {entry.state->step(), entry.state->average()};
    const bool is_double = entry.storage == kernels::AdamStorage::f64;
    const Key key{entry.group,          is_double,
                  entry.is_local(),     is_unread ? clock.get() : nullptr,
                  count.steps,          count.average.weight_sum,
                  count.average.lr_max, takes_part[i]};
    const auto [found, is_new] = group_of.emplace(key, static_cast<int64_t>(groups.size()));
    if (is_new) {
      groups.push_back({entry.group, is_double, entry.is_local(), takes_part[i] != 0,
                        std::make_shared<StepClock>(is_unread ? clock->host_count() : count)});
      origins.push_back(is_unread ? clock : nullptr);
    }
    chosen[i] = found->second;
  }
  if (reads_counts) most_unread_ = std::max<size_t>(64, 2 * groups.size());
  groups_ = std::move(groups);
  if (device.is_cuda()) place_counts(origins, device);
  for (size_t i = 0; i < entries.size(); ++i) {
    entries[i].step_group = chosen[i];
    entries[i].state->follow(groups_[static_cast<size_t>(chosen[i])].clock);
  }
  table_ = {};
}

void StepGroups::place_counts(const std::vector<std::shared_ptr<const StepClock>>& origins,
                              at::Device device) {
  std::vector<kernels::StepCount> host_counts;
  for (const Group& group : groups_) host_counts.push_back(group.clock->host_count());
  const auto count = static_cast<int64_t>(groups_.size());
  const auto row = static_cast<int64_t>(sizeof(kernels::StepCount) / sizeof(int64_t));
  at::Tensor counts = at::empty({count, row}, at::TensorOptions().dtype(at::kLong).device(device));
  at::Tensor pinned = at::empty(counts.sizes(), at::TensorOptions().dtype(at::kLong).pinned_memory(true));
  if (!host_counts.empty()) {
    std::memcpy(pinned.mutable_data_ptr(), host_counts.data(),
                host_counts.size() * sizeof(kernels::StepCount));
  }
  counts.copy_(pinned, /*non_blocking=*/true);
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (origins[i]) {
      origins[i]->copy_device_count(counts, static_cast<int64_t>(i));
      groups_[i].clock->let_device_lead();
    }
    groups_[i].clock->place_on_device(counts, static_cast<int64_t>(i));
  }
  device_counts_ = counts;
  device_scalars_ = at::empty({count * static_cast<int64_t>(sizeof(kernels::StepScalars))},
                              at::TensorOptions().dtype(at::kByte).device(device));
}

void StepGroups::configure(const std::vector<GroupSettings>& settings, double local_weight,
                           const GradientGuard* guard) {
  std::vector<kernels::StepGroup> wanted(groups_.size());
  for (size_t i = 0; i < groups_.size(); ++i) {
    const Group& group = groups_[i];
    wanted[i] = {settings[group.parameter_group].kernel, group.is_double, group.takes_part,
                 guard ? guard->group_factor(group.parameter_group) : nullptr};
    if (group.is_local) wanted[i].settings.factor *= local_weight;
  }
  if (wanted == table_.host()) return;
  table_.host() = std::move(wanted);
  table_.mark_changed();
}

const kernels::StepScalars* StepGroups::write_scalars(at::Device device,
                                                      const kernels::GradientCheck* check) {
  const std::vector<kernels::StepGroup>& groups = table_.host();
  if (device.is_cuda()) {
    auto* scalars = static_cast<kernels::StepScalars*>(device_scalars_.mutable_data_ptr());
    kernels::adam_prologue_cuda(table_.pointer(), static_cast<int64_t>(groups.size()),
                                static_cast<kernels::StepCount*>(device_counts_.mutable_data_ptr()), scalars,
                                check, current_stream(device));
    return scalars;
  }
  host_scalars_.resize(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    kernels::StepGroup group = groups[i];
    if (check) {
      group.settings.factor *= check->factor;
      if (group.clip) group.settings.factor *= *group.clip;
    }
    kernels::StepCount count = groups_[i].clock->host_count();
    kernels::adam_scalars_cpu(group, count.steps + 1, host_scalars_[i], count.average);
  }
  return host_scalars_.data();
}

at::Tensor StepGroups::copy_of_counts(at::Device device) const {
  return device.is_cuda() ? device_counts_.clone() : at::Tensor();
}

void StepGroups::take_back(const at::Tensor& counts) {
  if (counts.defined()) device_counts_.copy_(counts, /*non_blocking=*/true);
}

void StepGroups::count_step() {
  for (size_t i = 0; i < groups_.size(); ++i) {
    const kernels::StepGroup& group = table_.host()[i];
    if (group.active) groups_[i].clock->advance_host(group.settings);
  }
}

void StepGroups::let_device_lead() {
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (table_.host()[i].active) groups_[i].clock->let_device_lead();
  }
}

}  // namespace pacer::detail
