// A BestValue as a hook's state in checkpoints.
#pragma once

#include <pacer/core/error.h>
#include <pacer/hooks/best_value.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

inline void save_best_value(const BestValue& best, NamedTensors& state) {
  state["best"] = number_tensor(best.value);
  state["best_step"] = number_tensor(best.step);
  state["since"] = number_tensor(best.since);
}

// Throws InvalidArgument for numbers that cannot be.
inline BestValue load_best_value(const NamedTensors& state) {
  BestValue best;
  best.value = require_number<double>(state, "best");
  best.step = require_number<int64_t>(state, "best_step");
  best.since = require_number<int64_t>(state, "since");
  require(best.step >= -1 && best.since >= 0, "the checkpoint's best value is of step ", best.step, ", with ",
          best.since, " measurements since, which cannot be");
  return best;
}

}  // namespace pacer::detail
