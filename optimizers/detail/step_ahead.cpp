#include <pacer/optimizers/detail/step_ahead.h>

#include <algorithm>

#include <c10/core/DeviceGuard.h>

namespace pacer::detail {

const kernels::StepScalars* StepAhead::prepare(StepPlan& plan, double average, double local_weight,
                                               size_t first, size_t end) {
  const c10::DeviceGuard device_guard(plan.device);
  std::vector<kernels::StepScalars>& scalars = scalars_.host();
  int64_t last = -1;  // step group whose scalars are there
  for (size_t at = first; at < end; ++at) {
    const size_t i = plan.compressed_entries[at];
    const ParameterEntry& entry = plan.entries[i];
    const GroupSettings& settings = plan.settings[entry.group];
    const bool takes_part = plan.takes_part(entry, entry.gradient());
    if (!plan.step_groups.expects(entry.step_group, *entry.state, takes_part)) return nullptr;
    if (takes_part && entry.gradient().defined())
      check_gradient(entry.parameter, entry.gradient(), entry.name);
    if (entry.step_group != last) {
      last = entry.step_group;
      // The bits of a step, where the guard multiplies with the average.
      kernels::StepGroup group{settings.kernel, /*is_double=*/false, takes_part};
      group.settings.factor = 1.0;
      group.settings.factor *= local_weight;
      group.settings.factor *= average;
      scalars.resize(std::max(scalars.size(), static_cast<size_t>(entry.step_group) + 1));
      // Momentum does not depend on the step count.
      kernels::adam_scalars_cpu(group, /*step=*/1, scalars[static_cast<size_t>(entry.step_group)]);
    }
    plan.compressed_parameters->set_tensor(entry, plan.find_gradient(i, takes_part), settings);
  }
  scalars_.mark_changed();
  scalars_.send(plan.device);
  return scalars_.pointer();
}

}  // namespace pacer::detail
