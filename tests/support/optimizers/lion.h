// Lion, of examples/own_optimizer, under the names that optimizer tests share.
#pragma once

#include "own_optimizer/lion.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing {

template <>
struct Family<Lion> {
  using Options = OwnRuleOptions;
  using ParamState = OwnRuleParamState;
};

}  // namespace pacer::testing
