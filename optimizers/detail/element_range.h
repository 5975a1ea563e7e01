// Parameters of which an optimizer updates, and keeps state for, a range only, because ranks share the work.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include <ATen/core/Tensor.h>

#include <pacer/optimizers/adam_param_state.h>

namespace pacer::detail {

// Elements of a parameter, in the order in which they lie in its memory.
struct ElementRange {
  int64_t first = 0;
  int64_t count = 0;
};

// What of a parameter an optimizer updates where it is not all of it.
struct OwnedRange {
  ElementRange range;
  // Its gradient, a vector of `count` elements that stays where it is; undefined where it is in the range of
  // the parameter's gradient.
  at::Tensor gradient;
};
// By TensorImpl; parameters that are not here are whole.
using OwnedRanges = std::unordered_map<const void*, OwnedRange>;

// A state tensor of the whole parameter, or of this range already, as one of the range: dense, on the same
// device, and no view of the whole one. Throws InvalidArgument for any other.
at::Tensor cut_to_range(const at::Tensor& tensor, const at::Tensor& parameter, const ElementRange& range,
                        const std::string& name);
// The same for all of a parameter's state.
void cut_state(FusedAdamStateFields& state, const at::Tensor& parameter, const ElementRange& range,
               const std::string& name);

}  // namespace pacer::detail
