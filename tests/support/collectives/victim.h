// A running optimizer over named parameters, for tests that put one bad thing into it.
#pragma once

#include <string>
#include <vector>

#include "support/optimizers/optimizers.h"

namespace pacer::testing {

struct Victim {
  std::vector<Tensor> parameters = random_parameters({{3, 4}, {5}, {6}}, at::kFloat);
  NamedParameters named;
  FusedAdamW optimizer;

  explicit Victim(const FusedAdamWOptions& options = FusedAdamWOptions(0.1).amsgrad(true))
      : named(with_names(parameters)), optimizer(named, options) {
    set_random_gradients(parameters);
    optimizer.step();
    set_random_gradients(parameters);
  }
  static NamedParameters with_names(const std::vector<Tensor>& parameters) {
    NamedParameters names;
    names.insert("encoder.weight", parameters[0]);
    names.insert("encoder.bias", parameters[1]);
    names.insert("head.weight", parameters[2]);
    return names;
  }
  std::string unless_step_refused(const std::vector<std::string>& parts) {
    return unless_refused(optimizer, parts, [&] { optimizer.step(); });
  }
  // It goes on as if nothing had happened.
  bool recovers() {
    set_random_gradients(parameters);
    optimizer.step();
    return state_of(optimizer, parameters[0]).step() == 2 && state_of(optimizer, parameters[2]).step() == 2;
  }
};

}  // namespace pacer::testing
