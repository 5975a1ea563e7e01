#include <pacer/optimizers/detail/adam_slots.h>

#include <cstring>
#include <map>
#include <tuple>

#include <ATen/ops/empty.h>

namespace pacer::detail {
namespace {

// Slots on the GPU count in device memory; this many bytes of scalars each.
constexpr int64_t kBytes = kernels::kAdamScalarsBytes;

}  // namespace

bool AdamSlots::fit(const std::vector<AdamEntry>& entries, const std::vector<char>& takes_part) const {
  std::vector<char> participation(slots_.size(), -1);
  for (size_t i = 0; i < entries.size(); ++i) {
    const AdamEntry& entry = entries[i];
    if (entry.slot < 0 || entry.state->clock() != slots_[static_cast<size_t>(entry.slot)].clock) return false;
    char& slot = participation[static_cast<size_t>(entry.slot)];
    if (slot == -1) slot = takes_part[i];
    if (slot != takes_part[i]) return false;
  }
  return true;
}

void AdamSlots::assign(std::vector<AdamEntry>& entries, const std::vector<char>& takes_part,
                       at::Device device) {
  // Parameters meet in a slot if their counts are known to be equal: the same clock, or the same number on
  // the host.
  using Key = std::tuple<size_t, bool, const StepClock*, int64_t, char>;
  std::map<Key, int64_t> slot_of;
  std::vector<Slot> slots;
  std::vector<std::shared_ptr<const StepClock>> origins;
  std::vector<int64_t> chosen(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    const AdamEntry& entry = entries[i];
    const auto& clock = entry.state->clock();
    const bool device_leads = device.is_cuda() && clock && clock->device_leads();
    const bool is_double = entry.storage == kernels::AdamStorage::f64;
    const Key key{entry.group, is_double, device_leads ? clock.get() : nullptr,
                  device_leads ? 0 : entry.state->step(), takes_part[i]};
    const auto [found, is_new] = slot_of.emplace(key, static_cast<int64_t>(slots.size()));
    if (is_new) {
      slots.push_back(
          {entry.group, is_double, std::make_shared<StepClock>(device_leads ? 0 : entry.state->step())});
      origins.push_back(device_leads ? clock : nullptr);
    }
    chosen[i] = found->second;
  }
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
  device_scalars_ = at::empty({count * kBytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

void AdamSlots::configure(const std::vector<AdamGroupSettings>& settings,
                          const std::vector<AdamEntry>& entries, const std::vector<char>& takes_part) {
  std::vector<kernels::AdamSlot> wanted(slots_.size());
  for (size_t i = 0; i < slots_.size(); ++i) {
    wanted[i].settings = settings[slots_[i].group].kernel;
    wanted[i].is_double = slots_[i].is_double;
    wanted[i].active = 0;
  }
  for (size_t i = 0; i < entries.size(); ++i)
    wanted[static_cast<size_t>(entries[i].slot)].active |= takes_part[i];
  static_assert(sizeof(kernels::AdamSlot) == sizeof(kernels::AdamSettings) + 8,
                "compared as bytes: no padding");
  const bool same =
      wanted.size() == table_.host().size() &&
      std::memcmp(wanted.data(), table_.host().data(), wanted.size() * sizeof(kernels::AdamSlot)) == 0;
  if (same) return;
  table_.host() = std::move(wanted);
  table_.mark_changed();
}

const void* AdamSlots::write_scalars(at::Device device, const kernels::GradientCheck* check) {
  const std::vector<kernels::AdamSlot>& slots = table_.host();
  if (device.is_cuda()) {
    auto* scalars = device_scalars_.mutable_data_ptr();
    kernels::adam_prologue_cuda(table_.pointer(), static_cast<int64_t>(slots.size()),
                                static_cast<int64_t*>(device_steps_.mutable_data_ptr()), scalars, check,
                                current_stream(device));
    return scalars;
  }
  host_scalars_.resize(slots.size() * kBytes + 64);
  auto* scalars = host_scalars_.data() + (64 - reinterpret_cast<uintptr_t>(host_scalars_.data()) % 64);
  for (size_t i = 0; i < slots.size(); ++i) {
    if (!slots[i].active) continue;
    kernels::AdamSlot slot = slots[i];
    if (check) slot.settings.factor = check->factor;
    kernels::adam_scalars_cpu(slot, slots_[i].clock->host_steps() + 1, scalars + i * kBytes);
  }
  return scalars;
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
