// ScheduleFreeAdamW under the names that optimizer tests share.
#pragma once

#include <pacer/optimizers/schedule_free.h>

#include "support/optimizers/optimizers.h"

namespace pacer::testing {

template <>
struct Family<ScheduleFreeAdamW> {
  using Options = ScheduleFreeAdamWOptions;
  using ParamState = ScheduleFreeAdamWParamState;
};

}  // namespace pacer::testing
