// OneBitLamb in the tests of what it refuses.
#pragma once

#include <vector>

#include <pacer/optimizers/fused_lamb.h>

#include "support/onebit_lamb_ranks.h"
#include "support/onebit_refusals.h"

namespace pacer::testing {

inline OneBitLambOptions lamb_frozen_at_two() { return OneBitLambOptions(0.01).freeze_step(2); }

inline std::vector<OneBitLambGroup> small_lamb_groups(const OneBitLambOptions& options,
                                                      int64_t elements = 300) {
  return {{{{elements}, {7}}, options}, {{{5}}, OneBitLambOptions(options).compress(false)}};
}

}  // namespace pacer::testing
