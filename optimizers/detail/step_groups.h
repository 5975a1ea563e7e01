// Step groups: sets of entries that share a parameter group and a step count, and so the scalars of a step.
// An entry that sits out a step its companions take leaves their step group, with its own count, without
// asking the device; entries whose counts are equal again meet again.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/device/detail/device_buffer.h>
#include <pacer/kernels/adam.h>
#include <pacer/optimizers/detail/parameter_entry.h>

namespace pacer {
class GradientGuard;
}  // namespace pacer

namespace pacer::detail {

// Counts the applied steps of a step group, and what its average has taken in. The host knows the count as long
// as it alone decides whether a step is applied; once the device decides (finite check, graph replay), the device
// leads and reading the count waits for it.
class StepClock {
 public:
  explicit StepClock(const kernels::StepCount& count) : count_(count) {}

  kernels::StepCount read() const;
  bool device_leads() const { return device_leads_; }
  // What the host has counted itself: all steps while it leads.
  const kernels::StepCount& host_count() const { return count_; }
  int64_t host_steps() const { return count_.steps; }

  // Counts a step with these settings.
  void advance_host(const kernels::RuleSettings& settings);
  // Counts live in row `place` of `device_counts` (the bytes of a StepCount in each row, on the GPU).
  void place_on_device(at::Tensor device_counts, int64_t place) {
    device_counts_ = std::move(device_counts);
    place_ = place;
  }
  // Copies this clock's count, which the device leads, into row `place` of another count tensor.
  void copy_device_count(const at::Tensor& device_counts, int64_t place) const {
    device_counts.select(0, place).copy_(device_counts_.select(0, place_), /*non_blocking=*/true);
  }
  void let_device_lead() { device_leads_ = true; }

 private:
  kernels::StepCount count_;
  bool device_leads_ = false;
  at::Tensor device_counts_;
  int64_t place_ = 0;
};

class StepGroups {
 public:
  // True while every entry follows its step group's clock, each step group's entries agree on taking part,
  // and no two step groups could be one. takes_part[i] belongs to entries[i].
  bool fit(const std::vector<ParameterEntry>& entries, const std::vector<char>& takes_part);
  // Whether they may stay as they are where every entry is as expected: no two step groups could be one.
  bool may_stay() const { return !could_merge(); }

  // Sorts the entries into new step groups; step counts are kept. Where the device leads the counts of very
  // many step groups, this reads them, and so waits for it, to bring together those that are equal.
  void assign(std::vector<ParameterEntry>& entries, const std::vector<char>& takes_part, at::Device device);

  // Settings for the coming step. `settings[g]` belongs to parameter group g. Gradients of local entries
  // are those of this rank alone: times their settings' factor times `local_weight`. `guard` may have a factor for
  // each parameter group; null: the step has no check.
  void configure(const std::vector<GroupSettings>& settings, double local_weight, const GradientGuard* guard);

  // Whether an entry with that state is in that step group, and took part, or did not, when the step groups
  // fitted last, or were assigned.
  bool expects(int64_t step_group, const FusedAdamStateFields& state, bool takes_part) const {
    return follows(state, step_group) && groups_[static_cast<size_t>(step_group)].takes_part == takes_part;
  }

  // The next assign() reads all counts that the device leads, so that the host leads them; it waits for the device.
  void read_counts() { reads_counts_ = true; }

  // Sends what write_scalars needs to the GPU, where it changed.
  void send(at::Device device) { table_.send(device); }

  // Writes and returns the scalars of the coming step (host or device memory, as `check` is). On CUDA this
  // also advances the device's counts of the step groups that take part, unless the check is non-finite; null
  // for no check.
  const kernels::StepScalars* write_scalars(at::Device device, const kernels::GradientCheck* check);

  // The device's counts as they are now, a copy, and how they become so again: where a step fails behind
  // write_scalars, which has advanced them. Undefined on a CPU.
  at::Tensor copy_of_counts(at::Device device) const;
  void take_back(const at::Tensor& counts);

  // The host's counts of the step groups that take part.
  void count_step();
  // From now on only the device knows the counts of the step groups that take part.
  void let_device_lead();

 private:
  struct Group {
    size_t parameter_group;
    bool is_double;
    bool is_local;
    bool takes_part;
    std::shared_ptr<StepClock> clock;
  };
  // False for every entry before the first assign().
  bool follows(const FusedAdamStateFields& state, int64_t step_group) const {
    if (groups_.empty()) return false;
    const StepClock* clock = groups_[static_cast<size_t>(step_group)].clock.get();
    return state.follows(clock, clock->host_steps());
  }
  bool could_merge() const;
  void place_counts(const std::vector<std::shared_ptr<const StepClock>>& origins, at::Device device);

  std::vector<Group> groups_;
  DeviceBuffer<kernels::StepGroup> table_;
  std::vector<kernels::StepScalars> host_scalars_;
  at::Tensor device_scalars_;  // bytes
  at::Tensor device_counts_;   // a StepCount in each row, by step group
  bool reads_counts_ = false;  // once
  size_t most_unread_ = 64;    // step groups whose counts the device leads, before they are read
};

}  // namespace pacer::detail
