// average += share (weights - average), for many tensors at once.
#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

namespace pacer::detail {

// Both have one shape. The weights may have 16 bits where the average has 32, and may be on another device.
struct AverageAndWeights {
  at::Tensor average, weights;
};

// Gradients must be off. Waits for a GPU only where weights are on another device than their average. `*done` is
// 0 at first; where memory is short and this throws, it says how far it came, and a call with the same arguments goes on
// from there.
void add_to_averages(const std::vector<AverageAndWeights>& all, double share, size_t* done);

}  // namespace pacer::detail
