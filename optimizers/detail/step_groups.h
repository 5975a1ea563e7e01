// Step groups: sets of entries that share a parameter group and a step count, and so the scalars of a step.
// An entry that sits out a step its companions take leaves their step group, with its own count, without
// asking the device; entries whose counts are equal again meet again.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/device/detail/device_buffer.h>
#include <pacer/kernels/adam.h>
#include <pacer/optimizers/detail/parameter_entry.h>
#include <pacer/optimizers/detail/step_clock.h>

namespace pacer::detail {

class StepGroups {
 public:
  // True while every entry follows its step group's clock, each step group's entries agree on taking part,
  // and no two step groups could be one. takes_part[i] belongs to entries[i].
  bool fit(const std::vector<ParameterEntry>& entries, const std::vector<char>& takes_part);
  // The same where every entry is as expected.
  bool fit() const { return !could_merge(); }

  // Sorts the entries into new step groups; step counts are kept. Where the device leads the counts of very
  // many step groups, this reads them, and so waits for it, to bring together those that are equal.
  void assign(std::vector<ParameterEntry>& entries, const std::vector<char>& takes_part, at::Device device);

  // Settings for the coming step. `settings[g]` belongs to parameter group g. Gradients of compressed entries
  // are those of this rank alone: times their settings' factor times `local_weight`.
  void configure(const std::vector<GroupSettings>& settings, double local_weight);

  // Whether an entry with that state is in that step group (-1: in none), and took part, or did not, when the
  // step groups fitted last, or were assigned.
  bool expects(int64_t step_group, const FusedAdamStateFields& state, bool takes_part) const {
    return step_group >= 0 && follows(state, step_group) &&
           groups_[static_cast<size_t>(step_group)].takes_part == takes_part;
  }

  // Sends what write_scalars needs to the GPU, where it changed.
  void send(at::Device device) { table_.send(device); }

  // Writes and returns the scalars of the coming step (host or device memory, as `check` is). On CUDA this
  // also advances the device's counts of the step groups that take part, unless the check is non-finite; null
  // for no check.
  const kernels::StepScalars* write_scalars(at::Device device, const kernels::GradientCheck* check);

  // The host's counts of the step groups that take part.
  void count_step();
  // From now on only the device knows the counts of the step groups that take part.
  void let_device_lead();

 private:
  struct Group {
    size_t parameter_group;
    bool is_double;
    bool is_compressed;
    bool takes_part;
    std::shared_ptr<StepClock> clock;
  };
  bool follows(const FusedAdamStateFields& state, int64_t step_group) const {
    const StepClock* clock = groups_[static_cast<size_t>(step_group)].clock.get();
    return state.follows(clock, clock->host_steps());
  }
  bool could_merge() const;
  void place_counts(const std::vector<std::shared_ptr<const StepClock>>& origins, at::Device device);

  std::vector<Group> groups_;
  DeviceBuffer<kernels::StepGroup> table_;
  std::vector<kernels::StepScalars> host_scalars_;
  at::Tensor device_scalars_;  // bytes
  at::Tensor device_steps_;    // int64, by step group
  size_t most_unread_ = 64;    // step groups whose counts the device leads, before they are read
};

}  // namespace pacer::detail
