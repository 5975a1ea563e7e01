// The last sums of the columns of partial sums, in the order of kernels/math/layer_norm.h.
#pragma once

#include <cstdint>

namespace pacer::kernels {

// Writes the sums of columns [begin, end) of partials (parts, columns) to `to`, (columns).
void sum_parts(const float* partials, int64_t parts, int64_t columns, int64_t begin, int64_t end, float* to);

}  // namespace pacer::kernels
