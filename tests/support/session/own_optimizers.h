// The registered optimizers that are pacer's own and train as one process does.
#pragma once

#include <algorithm>
#include <vector>

#include "support/session/registry.h"

namespace pacer::testing {

// Those that exchange nothing but gradients.
inline std::vector<RegisteredOptimizer> own_optimizers_without_ranks() {
  std::vector<RegisteredOptimizer> all = all_optimizers();
  all.erase(std::remove_if(all.begin(), all.end(),
                           [](const RegisteredOptimizer& form) { return !form.is_own || form.has_ranks; }),
            all.end());
  return all;
}

}  // namespace pacer::testing
