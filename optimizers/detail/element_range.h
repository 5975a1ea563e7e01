// Parameters of which an optimizer updates, and keeps state for, a range only, because ranks share the work.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/optimizers/adam_param_state.h>

namespace pacer::detail {

// Elements of a parameter, in the order in which they lie in its memory.
struct ElementRange {
  int64_t first = 0;
  int64_t count = 0;
};

// The elements of a parameter that an optimizer updates, if it does not update all of them.
struct OwnedRange {
  ElementRange range;
  std::vector<int64_t> bounds = {};  // OwnedPart::bounds; empty where there are no other ranks
  // Its gradient and its values, vectors of `count` elements that stay where they are; undefined where they
  // are in the range of the parameter's gradient, and of the parameter.
  at::Tensor gradient = {}, values = {};
};
// Keys are TensorImpl pointers; parameters that are not here are whole.
using OwnedRanges = std::unordered_map<const void*, OwnedRange>;

// A state tensor of the whole parameter, or of this range already, as one of the range: dense, on the same
// device, and no view of the whole one. Throws InvalidArgument for any other.
at::Tensor cut_to_range(const at::Tensor& tensor, const at::Tensor& parameter, const ElementRange& range,
                        const std::string& name);
// The same for all of a parameter's state.
void cut_state(FusedAdamStateFields& state, const at::Tensor& parameter, const ElementRange& range,
               const std::string& name);

}  // namespace pacer::detail
