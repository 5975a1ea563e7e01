// The optimizers that scenarios train, by name.
#pragma once

#include <string>
#include <vector>

#include "support/registry.h"

namespace pacer::testing {

// In one process they are what they are without nodes, so that they are not in the registry.
inline std::vector<RegisteredOptimizer> optimizers_by_nodes() {
  const auto adam = OneBitAdamOptions(0.01).weight_decay(0.1).compress_alone(true).hierarchical(true);
  const auto lamb = OneBitLambOptions(0.01).weight_decay(0.1).compress_alone(true).hierarchical(true);
  return {{"OneBitAdam by nodes", true, making_onebit<OneBitAdam>(adam), at::kFloat, true},
          {"OneBitLamb by nodes, bf16", true, making_onebit<OneBitLamb>(lamb), at::kBFloat16, true}};
}

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
