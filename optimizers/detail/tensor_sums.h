// Sums over whole tensors, for decisions that the host takes now and then.
#pragma once

#include <cstdint>
#include <vector>

#include <c10/core/Device.h>

namespace pacer::detail {

enum class Term { magnitude, square };

// One for each array of fp32, in the order of core/reduction_order.h. Waits for a GPU.
std::vector<double> tensor_sums(Term term, const std::vector<const float*>& arrays,
                                const std::vector<int64_t>& counts, at::Device device);

}  // namespace pacer::detail
