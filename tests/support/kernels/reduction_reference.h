// The order of summation restated as one expression: every intermediate sum is a
// function of its position, evaluated by recursion. There is no array that is
// folded in place, so an error in the order has to be made twice to go unnoticed.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>

namespace pacer::testing {

// Sum of `width` leaves where position i of a level of width h holds position i plus position i + h of the
// level twice as wide; the result is position 0 of the level of width 1.
template <class Real>
Real sum_by_halves(int64_t width, const std::function<Real(int64_t)>& leaf) {
  const std::function<Real(int64_t, int64_t)> at = [&](int64_t level, int64_t position) -> Real {
    if (level == width) return leaf(position);
    return at(2 * level, position) + at(2 * level, position + level);
  };
  return at(1, 0);
}

// 512 groups of four neighbours out of 2,048 columns, each pair of neighbours first, then by halves.
template <class Real>
Real sum_of_columns(const std::function<Real(int64_t)>& column) {
  return sum_by_halves<Real>(512, [&](int64_t group) {
    const Real first_pair = column(4 * group) + column(4 * group + 1);
    const Real second_pair = column(4 * group + 2) + column(4 * group + 3);
    return first_pair + second_pair;
  });
}

// A unit of at most 32,768 elements: column j holds elements j, j + 2048, ..., each added with one rounding.
template <class Real>
Real sum_of_squares_of_unit(int64_t count, const std::function<Real(int64_t)>& element) {
  return sum_of_columns<Real>([&](int64_t j) {
    Real sum = 0;
    for (int64_t i = j; i < count; i += 2048) sum = std::fma(element(i), element(i), sum);
    return sum;
  });
}

// The units' sums in double: column j of 256 holds units j, j + 256, ...
inline double sum_of_units(int64_t count, const double* units) {
  return sum_by_halves<double>(256, [&](int64_t j) {
    double sum = 0;
    for (int64_t i = j; i < count; i += 256) sum += units[i];
    return sum;
  });
}

}  // namespace pacer::testing
