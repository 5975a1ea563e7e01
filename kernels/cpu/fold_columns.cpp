#include <pacer/kernels/cpu/fold_columns.h>

#include <pacer/core/reduction_order.h>
#include <pacer/kernels/cpu/target.h>

namespace pacer::kernels {
namespace {

template <class Real>
PACER_TARGET_CLONES Real fold_all(const Real* columns) {
  constexpr int64_t kFours = kReductionColumns / 4;
  constexpr int64_t kLast = 16;  // what a vector holds or less, which is not worth a loop over vectors
  alignas(64) Real sums[kFours];
#pragma omp simd
  for (int64_t i = 0; i < kFours; ++i) {
    sums[i] = (columns[4 * i] + columns[4 * i + 1]) + (columns[4 * i + 2] + columns[4 * i + 3]);
  }
  for (int64_t h = kFours / 2; h >= kLast; h /= 2) {
#pragma omp simd
    for (int64_t i = 0; i < h; ++i) sums[i] += sums[i + h];
  }
  return fold(sums, kLast);
}

}  // namespace

float fold_columns_cpu(const float* columns) { return fold_all(columns); }
double fold_columns_cpu(const double* columns) { return fold_all(columns); }

}  // namespace pacer::kernels
