// What this rank updates of a parameter where ranks share the work.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

namespace pacer {

struct ParameterRange {
  // These are this rank's elements: `count` of them from `first` on, in the order in which they lie in memory.
  int64_t first = 0;
  int64_t count = 0;
  // Rank r has the elements from bounds[r] to bounds[r + 1] - 1. Without bounds nobody shares the parameter.
  std::vector<int64_t> bounds = {};
  // Their gradient is here in every step, and they are here themselves: vectors of `count` elements of the
  // parameter's dtype. If these are undefined, they are in the parameter's gradient and in the parameter.
  at::Tensor gradient = {}, values = {};

  bool is_part() const { return !bounds.empty(); }
};

// The keys are TensorImpl pointers of parameters; parameters that are not here are whole.
using ParameterRanges = std::unordered_map<const void*, ParameterRange>;

}  // namespace pacer
