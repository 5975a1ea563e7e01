// FusedLamb under the names of support/optimizers/optimizers.h.
#pragma once

#include <vector>

#include <pacer/optimizers/fused_lamb.h>

#include "support/kernels/lamb_reference.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing {

template <>
struct Family<FusedLamb> {
  using Options = FusedLambOptions;
  using ParamState = FusedLambParamState;
};

inline LambRule rule_of(const FusedLambOptions& options) {
  LambRule rule;
  rule.lr = options.lr();
  rule.beta1 = std::get<0>(options.betas());
  rule.beta2 = std::get<1>(options.betas());
  rule.eps = options.eps();
  rule.weight_decay = options.weight_decay();
  rule.min_coeff = options.min_coeff();
  rule.max_coeff = options.max_coeff();
  rule.bias_correction = options.bias_correction();
  rule.adapt = options.adapt();
  return rule;
}

inline double norm_of(const Tensor& tensor) { return euclidean_norm(to_doubles(tensor)); }

}  // namespace pacer::testing
