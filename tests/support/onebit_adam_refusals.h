// OneBitAdam in the tests of what it refuses.
#pragma once

#include <vector>

#include "support/onebit_adam_ranks.h"
#include "support/onebit_refusals.h"

namespace pacer::testing {

inline OneBitAdamOptions frozen_at_two() { return OneBitAdamOptions(0.01).freeze_step(2); }

inline std::vector<OneBitAdamGroup> small_groups(const OneBitAdamOptions& options, int64_t elements = 300) {
  return {{{{elements}, {7}}, options}, {{{5}}, OneBitAdamOptions(options).compress(false)}};
}

}  // namespace pacer::testing
