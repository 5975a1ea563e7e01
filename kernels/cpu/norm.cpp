// The CPU side of the norm and finite check: the columns of a unit are SIMD accumulators in the L1 cache, so
// the specified order costs nothing over any other.
#include <pacer/kernels/norm.h>

#include <pacer/core/reduction_order.h>
#include <pacer/kernels/cpu/fold_columns.h>
#include <pacer/kernels/cpu/target.h>
#include <pacer/kernels/math/adam_storage.h>
#include <pacer/kernels/math/onebit.h>

namespace pacer::kernels {
namespace {

// Whole rows in fours: each column's accumulator stays in a register for four rows instead of one.
constexpr int64_t kRowsAtOnce = 4;

template <class Element, class Real>
PACER_TARGET_CLONES void add_squares(const Element* elements, int64_t count, Real* columns) {
  constexpr int64_t kWidth = kReductionColumns;
  int64_t row = 0;
  for (; row + kRowsAtOnce * kWidth <= count; row += kRowsAtOnce * kWidth) {
    const Element* first = elements + row;
#pragma omp simd
    for (int64_t column = 0; column < kWidth; ++column) {
      Real sum = columns[column];
      for (int64_t r = 0; r < kRowsAtOnce; ++r) {
        const Real x = load(first[r * kWidth + column]);
        sum = fma_(x, x, sum);
      }
      columns[column] = sum;
    }
  }
  for (; row < count; row += kWidth) {
    const int64_t width = count - row < kWidth ? count - row : kWidth;
#pragma omp simd
    for (int64_t column = 0; column < width; ++column) {
      const Real x = load(elements[row + column]);
      columns[column] = fma_(x, x, columns[column]);
    }
  }
}

PACER_TARGET_CLONES void add_magnitudes(const float* elements, int64_t count, float* columns) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) columns[i] = add_to_scale(ScaleNorm::l1, elements[i], columns[i]);
}

template <class Element, class Real>
double sum_of_squares(const void* elements, int64_t count) {
  alignas(64) Real columns[kReductionColumns] = {};
  add_squares(static_cast<const Element*>(elements), count, columns);
  return static_cast<double>(fold_columns_cpu(columns));
}

}  // namespace

double sum_of_squares_cpu(GradientType type, const void* elements, int64_t count) {
  const FullDenormals full_denormals;
  switch (type) {
    case GradientType::f64:
      return sum_of_squares<double, double>(elements, count);
    case GradientType::f32:
      return sum_of_squares<float, float>(elements, count);
    case GradientType::bf16:
      return sum_of_squares<BFloat16, float>(elements, count);
    case GradientType::f16:
      return sum_of_squares<Float16, float>(elements, count);
  }
  return 0;
}

double sum_of_magnitudes_cpu(const float* elements, int64_t count) {
  const FullDenormals full_denormals;
  alignas(64) float columns[kReductionColumns] = {};
  for (int64_t row = 0; row < count; row += kReductionColumns) {
    add_magnitudes(elements + row, count - row < kReductionColumns ? count - row : kReductionColumns,
                   columns);
  }
  return static_cast<double>(fold_columns_cpu(columns));
}

void finish_check_cpu(const double* partials, int64_t count, const GuardRule& rule, GradientCheck* check) {
  const FullDenormals full_denormals;
  guard_step(sum_partials(partials, count), rule, *check);
}

}  // namespace pacer::kernels
