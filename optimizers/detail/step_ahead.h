// The look ahead at a step that is still to come: compressed parameters can be taken up bucket by bucket
// while backward runs.
#pragma once

#include <cstddef>

#include <pacer/optimizers/detail/step_plan.h>

namespace pacer::detail {

class StepAhead {
 public:
  // See StepEngine::prepare_ahead.
  const kernels::StepScalars* prepare(StepPlan& plan, double average, double local_weight, size_t first,
                                      size_t end);

 private:
  DeviceBuffer<kernels::StepScalars> scalars_;  // by step group
};

}  // namespace pacer::detail
