// Slots: sets of parameters that share a parameter group and a step count, and so the scalars of a step. A
// parameter that sits out a step its companions take leaves their slot, with its own count, without asking
// the device.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/detail/device_buffer.h>
#include <pacer/kernels/adam.h>
#include <pacer/optimizers/detail/adam_entry.h>
#include <pacer/optimizers/detail/step_clock.h>

namespace pacer::detail {

class AdamSlots {
 public:
  // True while every entry follows its slot's clock and each slot's entries agree on taking part.
  // takes_part[i] belongs to entries[i].
  bool fit(const std::vector<AdamEntry>& entries, const std::vector<char>& takes_part) const;

  // Sorts the entries into new slots; step counts are kept.
  void assign(std::vector<AdamEntry>& entries, const std::vector<char>& takes_part, at::Device device);

  // Settings and participation for the coming step. `settings[g]` belongs to parameter group g.
  void configure(const std::vector<AdamGroupSettings>& settings, const std::vector<AdamEntry>& entries,
                 const std::vector<char>& takes_part);

  // Sends what write_scalars needs to the GPU, where it changed.
  void send(at::Device device) { table_.send(device); }

  // Writes and returns the scalars of the coming step (host or device memory, as `check` is). On CUDA this
  // also advances the device's counts of the slots that take part, unless the check is non-finite; null for
  // no check.
  const void* write_scalars(at::Device device, const kernels::GradientCheck* check);

  // The host's counts of the slots that take part.
  void count_step();
  // From now on only the device knows the counts of the slots that take part.
  void let_device_lead();

 private:
  struct Slot {
    size_t group;
    bool is_double;
    std::shared_ptr<StepClock> clock;
  };
  void place_counts(const std::vector<std::shared_ptr<const StepClock>>& origins, at::Device device);

  std::vector<Slot> slots_;
  DeviceBuffer<kernels::AdamSlot> table_;
  std::vector<unsigned char> host_scalars_;
  at::Tensor device_scalars_;
  at::Tensor device_steps_;
};

}  // namespace pacer::detail
