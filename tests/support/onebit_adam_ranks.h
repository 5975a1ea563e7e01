// OneBitAdam on threads as ranks, and the textbook that it must equal.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <pacer/optimizers/onebit_adam.h>

#include "support/onebit_adam_reference.h"
#include "support/onebit_ranks.h"

namespace pacer::testing {

template <>
struct Family<OneBitAdam> {
  static constexpr const char* kName = "OneBitAdam";
  using Options = OneBitAdamOptions;
  using Peer = FusedAdamW;
};
using OneBitAdamGroup = OneBitGroup<OneBitAdamOptions>;
using OneBitAdamRanks = OneBitRanks<OneBitAdam>;

// The textbook of these ranks, from where they start.
inline OneBitAdamTextbook textbook_of(const OneBitAdamRanks& ranks,
                                      const std::vector<OneBitAdamGroup>& groups) {
  OneBitAdamRules rules;
  set_rules(ranks, groups.front().options, rules);
  rules.refresh_every = groups.front().options.refresh_variance_every();
  std::vector<OneBitAdamParameter> parameters;
  for (const OneBitAdamGroup& group : groups) {
    for (size_t i = 0; i < group.shapes.size(); ++i) {
      parameters.push_back(
          textbook_parameter<OneBitAdamParameter>(group.options, ranks.parameters[0][parameters.size()]));
    }
  }
  return {std::move(rules), std::move(parameters)};
}

inline std::string own_difference(const OneBitAdamParameter&, const OneBitAdam&, const Tensor&,
                                  const NamedTensors*) {
  return "";
}

}  // namespace pacer::testing
