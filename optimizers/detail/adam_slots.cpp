#include <pacer/optimizers/detail/adam_slots.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include <ATen/ops/empty.h>

namespace pacer::detail {

bool AdamSlots::fit(const std::vector<ParameterEntry>& entries, const std::vector<char>& takes_part) {
  std::vector<char> active(slots_.size(), -1);
  for (size_t i = 0; i < entries.size(); ++i) {
    const ParameterEntry& entry = entries[i];
    if (entry.slot < 0 || !follows(*entry.state, entry.slot)) return false;
    char& slot = active[static_cast<size_t>(entry.slot)];
    if (slot == -1) slot = takes_part[i];
    if (slot != takes_part[i]) return false;
  }
  for (size_t s = 0; s < slots_.size(); ++s) slots_[s].takes_part = active[s] == 1;
  return !could_merge();
}

bool AdamSlots::could_merge() const {
  if (slots_.size() < 2) return false;
  std::set<std::tuple<size_t, bool, bool, bool, int64_t>> seen;
  size_t unread = 0;
  for (size_t s = 0; s < slots_.size(); ++s) {
    const Slot& slot = slots_[s];
    if (slot.clock->device_leads()) {
      ++unread;
    } else if (!seen.emplace(slot.group, slot.is_double, slot.is_compressed, slot.takes_part,
                             slot.clock->host_steps())
                    .second) {
      return true;
    }
  }
  return unread > most_unread_;
}

void AdamSlots::assign(std::vector<ParameterEntry>& entries, const std::vector<char>& takes_part,
                       at::Device device) {
  // Entries meet in a slot if their counts are known to be equal: the same clock, or the same number.
  const bool reads_counts = slots_.size() > most_unread_;
  using Key = std::tuple<size_t, bool, bool, const StepClock*, int64_t, char>;
  std::map<Key, int64_t> slot_of;
  std::vector<Slot> slots;
  std::vector<std::shared_ptr<const StepClock>> origins;
  std::vector<int64_t> chosen(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    const ParameterEntry& entry = entries[i];
    const auto clock = entry.state->clock();
    const bool is_unread = device.is_cuda() && clock && clock->device_leads() && !reads_counts;
    const int64_t steps = is_unread ? 0 : entry.state->step();
    const bool is_double = entry.storage == kernels::AdamStorage::f64;
    const Key key{entry.group, is_double,    entry.is_compressed, is_unread ? clock.get() : nullptr,
                  steps,       takes_part[i]};
    const auto [found, is_new] = slot_of.emplace(key, static_cast<int64_t>(slots.size()));
    if (is_new) {
      slots.push_back({entry.group, is_double, entry.is_compressed, takes_part[i] != 0,
                       std::make_shared<StepClock>(is_unread ? clock->host_steps() : steps)});
      origins.push_back(is_unread ? clock : nullptr);
    }
    chosen[i] = found->second;
  }
  if (reads_counts) most_unread_ = std::max<size_t>(64, 2 * slots.size());
  slots_ = std::move(slots);
  if (device.is_cuda()) place_counts(origins, device);
  for (size_t i = 0; i < entries.size(); ++i) {
    entries[i].slot = chosen[i];
    entries[i].state->follow(slots_[static_cast<size_t>(chosen[i])].clock);
  }
  table_ = {};
}

void AdamSlots::place_counts(const std::vector<std::shared_ptr<const StepClock>>& origins,
                             at::Device device) {
  std::vector<int64_t> host_counts;
  for (const Slot& slot : slots_) host_counts.push_back(slot.clock->host_steps());
  const auto count = static_cast<int64_t>(slots_.size());
  at::Tensor steps = at::empty({count}, at::TensorOptions().dtype(at::kLong).device(device));
  at::Tensor pinned = at::empty(steps.sizes(), at::TensorOptions().dtype(at::kLong).pinned_memory(true));
  if (!host_counts.empty())
    std::memcpy(pinned.mutable_data_ptr(), host_counts.data(), host_counts.size() * 8);
  steps.copy_(pinned, /*non_blocking=*/true);
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (origins[i]) {
      origins[i]->copy_device_count(steps, static_cast<int64_t>(i));
      slots_[i].clock->let_device_lead();
    }
    slots_[i].clock->place_on_device(steps, static_cast<int64_t>(i));
  }
  device_steps_ = steps;
  device_scalars_ = at::empty({count * static_cast<int64_t>(sizeof(kernels::StepScalars))},
                              at::TensorOptions().dtype(at::kByte).device(device));
}

void AdamSlots::configure(const std::vector<GroupSettings>& settings, double local_weight) {
  std::vector<kernels::AdamSlot> wanted(slots_.size());
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    wanted[i] = {settings[slot.group].kernel, slot.is_double, slot.takes_part};
    if (slot.is_compressed) wanted[i].settings.factor *= local_weight;
  }
  if (wanted == table_.host()) return;
  table_.host() = std::move(wanted);
  table_.mark_changed();
}

void AdamSlots::count_step() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (table_.host()[i].active) slots_[i].clock->advance_host();
  }
}

void AdamSlots::let_device_lead() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (table_.host()[i].active) slots_[i].clock->let_device_lead();
  }
}

}  // namespace pacer::detail
