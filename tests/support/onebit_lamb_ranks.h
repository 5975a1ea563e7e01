// OneBitLamb on threads as ranks, and the textbook that it must equal.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <pacer/optimizers/fused_lamb.h>
#include <pacer/optimizers/onebit_lamb.h>

#include "support/onebit_lamb_reference.h"
#include "support/onebit_ranks.h"

namespace pacer::testing {

template <>
struct Family<OneBitLamb> {
  static constexpr const char* kName = "OneBitLamb";
  using Options = OneBitLambOptions;
  using Peer = FusedLamb;
};
using OneBitLambGroup = OneBitGroup<OneBitLambOptions>;
using OneBitLambRanks = OneBitRanks<OneBitLamb>;

// The textbook of these ranks, from where they start.
inline OneBitLambTextbook textbook_of(const OneBitLambRanks& ranks,
                                      const std::vector<OneBitLambGroup>& groups) {
  OneBitLambRules rules;
  set_rules(ranks, groups.front().options, rules);
  std::vector<OneBitLambParameter> parameters;
  for (const OneBitLambGroup& group : groups) {
    for (size_t i = 0; i < group.shapes.size(); ++i) {
      const Tensor& initial = ranks.parameters[0][parameters.size()];
      auto p = textbook_parameter<OneBitLambParameter>(group.options, initial);
      p.min_coeff = group.options.min_coeff();
      p.max_coeff = group.options.max_coeff();
      p.coeff_beta = group.options.coeff_beta();
      p.factor_min = group.options.factor_min();
      p.factor_max = group.options.factor_max();
      p.factor_threshold = group.options.factor_threshold();
      p.adapt = group.options.adapt();
      parameters.push_back(std::move(p));
    }
  }
  return {std::move(rules), std::move(parameters)};
}

// `frozen`: what the optimizer exports, where the parameter's variance is frozen.
inline std::string own_difference(const OneBitLambParameter& p, const OneBitLamb& optimizer,
                                  const Tensor& parameter, const NamedTensors* frozen) {
  if (!p.compress) return "";
  if (optimizer.coefficient(parameter) != p.coefficient()) return "coefficient";
  if (optimizer.factor(parameter) != p.factor) return "factor";
  if (optimizer.momentum_scale(parameter) != static_cast<double>(p.scale)) return "momentum_scale";
  if (frozen == nullptr) return "";
  const auto found = frozen->find(optimizer.parameter_name(parameter) + "/fresh_variance");
  return found != frozen->end() && equals_bits(found->second, p.fresh_variance) ? "" : "fresh_variance";
}

}  // namespace pacer::testing
