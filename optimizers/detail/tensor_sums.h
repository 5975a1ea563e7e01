// Sums over units and over whole tensors, these for decisions that the host takes now and then.
#pragma once

#include <cstdint>
#include <vector>

#include <c10/core/Device.h>

#include <pacer/core/tile.h>
#include <pacer/kernels/norm.h>
#include <pacer/optimizers/detail/shared_sums.h>

namespace pacer::detail {

// The sum over a unit of this gradient, on the CPU; 0 where there is none.
double unit_sum_of_squares(kernels::GradientType type, const void* gradient, const Tile& unit);

enum class Term { magnitude, square };

// One for each array of fp32, in the order of core/reduction_order.h; where the arrays are parts of shared
// tensors, of each whole one. Waits for a GPU.
std::vector<double> tensor_sums(Term term, const std::vector<const float*>& arrays,
                                const std::vector<int64_t>& counts, at::Device device,
                                SharedUnits* shared = nullptr);

}  // namespace pacer::detail
