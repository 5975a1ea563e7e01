// The one order in which pacer adds numbers. Floating-point addition is not associative, so a norm has the
// same bits on CPU and GPU, for every grid, thread count and run only if the order of its additions is part
// of the definition:
//
//   unit       kReductionUnit consecutive elements from the start of the reduced range, missing elements 0
//   columns    inside a unit, column j adds the terms of elements j, j + kReductionColumns, ... in order
//   fours      (c0 + c1) + (c2 + c3) of each four neighbouring columns
//   fold       acc[i] += acc[i + h] for h = 256, 128, ... 1; acc[0] is the unit's partial sum
//   partials   in double: column j of kPartialColumns adds partials j, j + kPartialColumns, ...; then fold
//
// Terms are accumulated with one fused multiply-add each (sum of squares: acc = fma(x, x, acc)).
#pragma once

#include <cstdint>

namespace pacer {

constexpr int64_t kReductionUnit = 32768;    // elements
constexpr int64_t kReductionColumns = 2048;  // accumulators inside a unit
constexpr int64_t kPartialColumns = 256;     // accumulators over the units' partial sums

// acc[i] += acc[i + h] for h = width / 2 ... 1, in place; returns acc[0]. `width` is a power of two.
template <class Real>
Real fold(Real* acc, int64_t width) {
  for (int64_t h = width / 2; h >= 1; h /= 2) {
    for (int64_t i = 0; i < h; ++i) acc[i] += acc[i + h];
  }
  return acc[0];
}

// The last two levels of a unit's sum: `columns` holds kReductionColumns accumulators and is overwritten.
template <class Real>
Real fold_columns(Real* columns) {
  constexpr int64_t kFours = kReductionColumns / 4;
  for (int64_t i = 0; i < kFours; ++i) {
    columns[i] = (columns[4 * i] + columns[4 * i + 1]) + (columns[4 * i + 2] + columns[4 * i + 3]);
  }
  return fold(columns, kFours);
}

// Adds `count` partial sums in the specified order. 0 for an empty list.
inline double sum_partials(const double* partials, int64_t count) {
  double columns[kPartialColumns] = {};
  for (int64_t i = 0; i < count; ++i) columns[i % kPartialColumns] += partials[i];
  return fold(columns, kPartialColumns);
}

}  // namespace pacer
