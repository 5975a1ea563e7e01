// The CUDA side of the norm and finite check: one block per unit, its columns in registers, 16-byte loads, or
// one warp per unit where all are short; then one small block adds the units' partial sums. Reads each
// gradient once (4 B per fp32 element) and writes 8 B per 32,768 elements. Deterministic: no atomics,
// partials in fixed places, the order of core/reduction_order.h.
#include <pacer/kernels/norm.h>

#include <pacer/core/reduction_order.h>
#include <pacer/kernels/math/adam_storage.h>
#include <pacer/kernels/math/onebit.h>
#include <pacer/kernels/cuda/fold.cuh>
#include <pacer/kernels/cuda/launch.cuh>

namespace pacer::kernels {
namespace {

constexpr int kFours = kReductionColumns / 4;
constexpr int kRows = kReductionUnit / kReductionColumns;

// Columns per thread: 4 (one 16-byte load a row in fp32), 8 for 16-bit elements.
template <class Element>
constexpr int kColumns = sizeof(Element) == 2 ? 8 : 4;
template <class Element>
constexpr int kNormThreads = kReductionColumns / kColumns<Element>;
constexpr int kWarp = 32;
constexpr int kShortThreads = 128;

// What an element adds to its column.
struct Square {
  template <class Real>
  __device__ __forceinline__ Real operator()(Real x, Real column) const {
    return fma_(x, x, column);
  }
};
struct Magnitude {
  __device__ __forceinline__ float operator()(float x, float column) const {
    return add_to_scale(ScaleNorm::l1, x, column);
  }
};

template <class Element, class Real, class Term>
__global__ void __launch_bounds__(kNormThreads<Element>)
    sum_kernel(const Tile* __restrict__ units, const AdamGradient* __restrict__ gradients,
               const uint32_t* __restrict__ places, double* __restrict__ partials) {
  constexpr int kMine = kColumns<Element>;
  constexpr Term term;
  const Tile unit = units[blockIdx.x];
  const Element* gradient = static_cast<const Element*>(gradients[unit.tensor].gradient);
  double* partial = partials + (places == nullptr ? blockIdx.x : places[blockIdx.x]);
  if (gradient == nullptr) {
    if (threadIdx.x == 0) *partial = 0;
    return;
  }
  const Element* elements = gradient + unit.offset;
  const int count = static_cast<int>(unit.count);
  const int first_column = threadIdx.x * kMine;
  Real columns[kMine] = {};
  if (count == kReductionUnit && is_packet_aligned<Element, kMine>(elements)) {
#pragma unroll 8
    for (int row = 0; row < kRows; ++row) {
      Element values[kMine];
      load_packet(elements + row * kReductionColumns + first_column, values);
#pragma unroll
      for (int c = 0; c < kMine; ++c) {
        columns[c] = term(static_cast<Real>(load(values[c])), columns[c]);
      }
    }
  } else {
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int c = 0; c < kMine; ++c) {
        const int i = row * static_cast<int>(kReductionColumns) + first_column + c;
        if (i < count) columns[c] = term(static_cast<Real>(load(elements[i])), columns[c]);
      }
    }
  }
  __shared__ Real fours[kFours];
#pragma unroll
  for (int c = 0; c < kMine; c += 4) {
    fours[(first_column + c) / 4] = (columns[c] + columns[c + 1]) + (columns[c + 2] + columns[c + 3]);
  }
  const Real sum = fold_block<kFours>(fours);
  if (threadIdx.x == 0) *partial = static_cast<double>(sum);
}

// Lane l holds the fours l, l + 32, ... of a unit of one row, so that the folds of 256 to 32 stay in the
// lane.
template <class Element, class Real, class Term>
__device__ Real sum_row_by_warp(const Element* elements, int count) {
  constexpr int kFoursOfLane = kFours / kWarp;
  constexpr Term term;
  const int lane = threadIdx.x % kWarp;
  Real fours[kFoursOfLane] = {};
#pragma unroll
  for (int k = 0; k < kFoursOfLane; ++k) {
    if (k * kWarp * 4 >= count) break;
    Real columns[4] = {};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int i = (k * kWarp + lane) * 4 + c;
      if (i < count) columns[c] = term(static_cast<Real>(load(elements[i])), Real{0});
    }
    fours[k] = (columns[0] + columns[1]) + (columns[2] + columns[3]);
  }
#pragma unroll
  for (int h = kFoursOfLane / 2; h >= 1; h /= 2) {
#pragma unroll
    for (int k = 0; k < h; ++k) fours[k] += fours[k + h];
  }
  return fold_warp(fours[0]);
}

template <class Element, class Real, class Term>
__global__ void __launch_bounds__(kShortThreads)
    sum_short_kernel(const Tile* __restrict__ units, int64_t count,
                     const AdamGradient* __restrict__ gradients, const uint32_t* __restrict__ places,
                     double* __restrict__ partials) {
  const int64_t i = (blockIdx.x * static_cast<int64_t>(kShortThreads) + threadIdx.x) / kWarp;
  if (i >= count) return;
  const Tile unit = units[i];
  const Element* gradient = static_cast<const Element*>(gradients[unit.tensor].gradient);
  const int elements = gradient == nullptr ? 0 : static_cast<int>(unit.count);
  const Real sum = sum_row_by_warp<Element, Real, Term>(gradient + unit.offset, elements);
  if (threadIdx.x % kWarp == 0) partials[places == nullptr ? i : places[i]] = static_cast<double>(sum);
}

__global__ void __launch_bounds__(kPartialColumns)
    finish_check_kernel(const double* __restrict__ partials, int64_t count, const GuardRule* rule,
                        GradientCheck* check) {
  const double sum = sum_partials_by_block(partials, count);
  if (threadIdx.x == 0) guard_step(sum, *rule, *check);
}

// One thread.
__global__ void early_factor_kernel(const double* sum_of_squares, double local_weight, double workers,
                                    const GuardRule* rule, const GradientCheck* check, double* factor) {
  *factor = early_factor(*sum_of_squares, local_weight, workers, *rule, *check);
}

__global__ void __launch_bounds__(kPartialColumns)
    sum_partials_kernel(const double* __restrict__ partials, int64_t count, double* sum) {
  const double total = sum_partials_by_block(partials, count);
  if (threadIdx.x == 0) *sum = total;
}

template <class Element, class Real, class Term = Square>
void launch(const Tile* units, int64_t count, const AdamGradient* gradients, const uint32_t* places,
            double* partials, cudaStream_t stream, int64_t longest = kReductionUnit) {
  require(count < (int64_t{1} << 31), "more than 2^31 reduction units in one launch; split the gradients");
  if (count == 0) return;
  if (longest <= kReductionColumns) {
    const int64_t blocks = ceil_divide(count, kShortThreads / kWarp);
    sum_short_kernel<Element, Real, Term><<<static_cast<unsigned>(blocks), kShortThreads, 0, stream>>>(
        units, count, gradients, places, partials);
  } else {
    sum_kernel<Element, Real, Term><<<static_cast<unsigned>(count), kNormThreads<Element>, 0, stream>>>(
        units, gradients, places, partials);
  }
  check_launch("the gradient norm");
}

}  // namespace

void sum_of_squares_cuda(GradientType type, const Tile* units, int64_t count, const AdamGradient* gradients,
                         const uint32_t* places, double* partials, Stream stream, int64_t longest) {
  switch (type) {
    case GradientType::f64:
      return launch<double, double>(units, count, gradients, places, partials, stream, longest);
    case GradientType::f32:
      return launch<float, float>(units, count, gradients, places, partials, stream, longest);
    case GradientType::bf16:
      return launch<BFloat16, float>(units, count, gradients, places, partials, stream, longest);
    case GradientType::f16:
      return launch<Float16, float>(units, count, gradients, places, partials, stream, longest);
  }
}

void sum_of_magnitudes_cuda(const Tile* units, int64_t count, const AdamGradient* arrays, double* partials,
                            Stream stream) {
  launch<float, float, Magnitude>(units, count, arrays, nullptr, partials, stream);
}

void sum_partials_cuda(const double* partials, int64_t count, double* sum, Stream stream) {
  sum_partials_kernel<<<1, kPartialColumns, 0, stream>>>(partials, count, sum);
  check_launch("a sum");
}

void finish_check_cuda(const double* partials, int64_t count, const GuardRule* rule, GradientCheck* check,
                       Stream stream) {
  finish_check_kernel<<<1, kPartialColumns, 0, stream>>>(partials, count, rule, check);
  check_launch("the finite check");
}

void early_factor_cuda(const double* sum_of_squares, double local_weight, double workers,
                       const GuardRule* rule, const GradientCheck* check, double* factor, Stream stream) {
  early_factor_kernel<<<1, 1, 0, stream>>>(sum_of_squares, local_weight, workers, rule, check, factor);
  check_launch("a clip factor");
}

}  // namespace pacer::kernels
