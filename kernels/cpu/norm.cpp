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

template <class Element, class Real>
PACER_HOST_DEVICE void add_row_of_squares(const Element* elements, int64_t width, Real* columns) {
#pragma omp simd
  for (int64_t column = 0; column < width; ++column) {
    const Real x = load(elements[column]);
    columns[column] = fma_(x, x, columns[column]);
  }
}

// Row by row: several rows at a time would save accesses to the columns, which cost nothing beside memory,
// and lose to what the processor fetches ahead of one row. A whole row's width is known when it is compiled.
template <class Element, class Real>
PACER_TARGET_CLONES void add_squares(const Element* elements, int64_t count, Real* columns) {
  int64_t row = 0;
  for (; row + kReductionColumns <= count; row += kReductionColumns) {
    add_row_of_squares(elements + row, kReductionColumns, columns);
  }
  add_row_of_squares(elements + row, count - row, columns);
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

void early_factor_cpu(const double* sum_of_squares, double local_weight, double workers,
                      const GuardRule& rule, const GradientCheck* check, double* factor) {
  const FullDenormals full_denormals;
  *factor = early_factor(*sum_of_squares, local_weight, workers, rule, *check);
}

}  // namespace pacer::kernels
