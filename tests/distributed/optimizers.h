// The optimizers that scenarios train, by name.
#pragma once

#include <string>
#include <vector>

#include "support/session/registry.h"

namespace pacer::testing {

inline RegisteredOptimizer optimizer_named(const std::string& name) {
  for (const RegisteredOptimizer& optimizer : optimizers_by_nodes()) {
    if (optimizer.name == name) return optimizer;
  }
  for (const RegisteredOptimizer& optimizer : all_optimizers()) {
    if (optimizer.name == name) return optimizer;
  }
  throw Error("no optimizer has the name " + name);
}

}  // namespace pacer::testing
