// The last additions of a unit's sum in the order of core/reduction_order.h, on the CPU: from columns to one
// number.
#pragma once

#include <cstdint>

#include <pacer/core/reduction_order.h>

namespace pacer::kernels {

// Fours of neighbouring columns, then halves on halves. kReductionColumns columns.
float fold_columns_cpu(const float* columns);
double fold_columns_cpu(const double* columns);

// How many columns a unit of so many elements needs: a power of two from 4 on, and kReductionColumns at most.
inline int64_t used_columns(int64_t count) {
  int64_t width = 4;
  while (width < count && width < kReductionColumns) width *= 2;
  return width;
}
// The same where only the first `width` columns, as used_columns has it, are not zero. They are overwritten.
template <class Real>
double fold_first_columns(Real* columns, int64_t width) {
  if (width == kReductionColumns) return static_cast<double>(fold_columns_cpu(columns));
  for (int64_t i = 0; i < width / 4; ++i) {
    columns[i] = (columns[4 * i] + columns[4 * i + 1]) + (columns[4 * i + 2] + columns[4 * i + 3]);
  }
  return static_cast<double>(fold(columns, width / 4));
}

}  // namespace pacer::kernels
