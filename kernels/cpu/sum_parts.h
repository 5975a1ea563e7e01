// The last sum of a column of partial sums, in the order of kernels/math/layer_norm.h.
#pragma once

#include <cstdint>

#include <pacer/core/reduction_order.h>
#include <pacer/kernels/math/layer_norm.h>

namespace pacer::kernels {

// partials (parts, columns).
inline float sum_of_parts(const float* partials, int64_t parts, int64_t columns, int64_t column) {
  float accumulators[kLayerNormPartLanes] = {};
  for (int64_t part = 0; part < parts; ++part) {
    accumulators[part % kLayerNormPartLanes] += partials[part * columns + column];
  }
  return fold(accumulators, kLayerNormPartLanes);
}

}  // namespace pacer::kernels
