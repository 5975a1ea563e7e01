// What a flat buffer of the 1-bit optimizers is made of: compressed parameters in the order of their
// registration, as they were when the variance froze.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/kernels/math/adam_storage.h>
#include <pacer/optimizers/detail/optimizer_traits.h>
#include <pacer/optimizers/detail/parameter_check.h>

namespace pacer::detail {

struct OneBitTensor {
  std::string name;
  size_t group = 0;
  std::vector<int64_t> sizes, strides;
  int64_t count = 0;
  kernels::AdamStorage storage = kernels::AdamStorage::f32;
};

// One for each tensor.
using OneBitStates = std::vector<FusedAdamStateFields*>;

std::vector<int64_t> counts_of(const std::vector<OneBitTensor>& tensors);

// The parameters of compressed groups.
std::vector<OneBitTensor> onebit_tensors(const ParamGroups& groups,
                                         const std::vector<AdamGroupSettings>& settings,
                                         const ParameterNames& names);
// States of step 0 get the largest count of their group, or where that is 0, of all: else their first step
// would be divided by the bias correction of step 1, and be ten times as large as anybody else's.
void give_unstepped_counts(const std::vector<OneBitTensor>& tensors, const OneBitStates& states);
// Their states; throws InvalidArgument where one has none.
OneBitStates onebit_states(const ParamGroups& groups, const std::vector<AdamGroupSettings>& settings,
                           const ParameterNames& names, const ParamStates& states);

}  // namespace pacer::detail
