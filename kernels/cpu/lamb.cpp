// The CPU loops of the LAMB kernels: 24 B and 16 B per parameter in fp32. The columns of a unit are SIMD
// accumulators in the L1 cache, as in norm.cpp. The element arithmetic is kernels/math; nothing here rounds.
#include <pacer/kernels/lamb.h>

#include <algorithm>

#include <pacer/core/reduction_order.h>
#include <pacer/kernels/cpu/element_loop.h>
#include <pacer/kernels/cpu/fold_columns.h>
#include <pacer/kernels/cpu/target.h>

namespace pacer::kernels {
namespace {

template <AdamStorage kStorage>
using ScalarsOf = LambScalars<typename StorageOf<kStorage>::Real>;

template <AdamStorage kStorage>
const ScalarsOf<kStorage>& scalars_of(const AdamGradient& gradient, const StepScalars* scalars) {
  return scalars[gradient.scalars].as<ScalarsOf<kStorage>>();
}

// A function of its own: locals of the loop below would be arrays to the compiler and keep it from
// vectorising.
template <AdamStorage kStorage>
PACER_HOST_DEVICE void moments_of_element(const AdamRange<kStorage>& range, int64_t i,
                                          const ScalarsOf<kStorage>& scalars,
                                          typename StorageOf<kStorage>::Real& parameter_column,
                                          typename StorageOf<kStorage>::Real& update_column) {
  StoredElement<kStorage> e;
  e.gradient = range.gradient[i];
  e.parameter = range.parameter[i];
  e.exp_avg = range.exp_avg[i];
  e.exp_avg_sq = range.exp_avg_sq[i];
  if constexpr (StorageOf<kStorage>::kHasExtra) e.extra = range.extra[i];
  const auto terms = lamb_moments(e, scalars);
  range.exp_avg[i] = e.exp_avg;
  range.exp_avg_sq[i] = e.exp_avg_sq;
  parameter_column = fma_(terms.parameter, terms.parameter, parameter_column);
  update_column = fma_(terms.update, terms.update, update_column);
}

// `width` elements from `begin` on, one per column.
template <AdamStorage kStorage>
PACER_TARGET_CLONES void moments_of_row(const AdamRange<kStorage>& r, const ScalarsOf<kStorage>& s,
                                        int64_t begin, int64_t width,
                                        typename StorageOf<kStorage>::Real* parameter_columns,
                                        typename StorageOf<kStorage>::Real* update_columns) {
  const AdamRange<kStorage> range = r;  // local copies: nothing the loop writes can alias them
  const ScalarsOf<kStorage> scalars = s;
#pragma omp simd
  for (int64_t column = 0; column < width; ++column) {
    moments_of_element(range, begin + column, scalars, parameter_columns[column], update_columns[column]);
  }
}

template <AdamStorage kStorage>
void moments_of_unit(const AdamRange<kStorage>& range, const ScalarsOf<kStorage>& scalars,
                     double* parameter_partial, double* update_partial) {
  using Real = typename StorageOf<kStorage>::Real;
  alignas(64) Real parameter_columns[kReductionColumns];
  alignas(64) Real update_columns[kReductionColumns];
  const int64_t width = used_columns(range.count);
  std::fill_n(parameter_columns, width, Real{0});
  std::fill_n(update_columns, width, Real{0});
  for (int64_t row = 0; row < range.count; row += kReductionColumns) {
    moments_of_row(range, scalars, row, std::min(kReductionColumns, range.count - row), parameter_columns,
                   update_columns);
  }
  *parameter_partial = fold_first_columns(parameter_columns, width);
  *update_partial = fold_first_columns(update_columns, width);
}

template <AdamStorage kStorage>
PACER_HOST_DEVICE void update_element(const AdamRange<kStorage>& range, int64_t i,
                                      const ScalarsOf<kStorage>& scalars,
                                      typename StorageOf<kStorage>::Real step_size, uint32_t random16) {
  StoredElement<kStorage> e;
  e.parameter = range.parameter[i];
  e.exp_avg = range.exp_avg[i];
  e.exp_avg_sq = range.exp_avg_sq[i];
  if constexpr (StorageOf<kStorage>::kHasExtra) e.extra = range.extra[i];
  lamb_step(e, scalars, step_size, random16);
  range.parameter[i] = e.parameter;
  if constexpr (StorageOf<kStorage>::kHasExtra) range.extra[i] = e.extra;
}

template <AdamStorage kStorage>
PACER_TARGET_CLONES void update_range(const AdamRange<kStorage>& r, const ScalarsOf<kStorage>& s,
                                      typename StorageOf<kStorage>::Real step_size) {
  const AdamRange<kStorage> range = r;
  const ScalarsOf<kStorage> scalars = s;
#pragma omp simd
  for (int64_t i = 0; i < range.count; ++i) update_element(range, i, scalars, step_size, 0);
}

PACER_TARGET_CLONES void update_block(const AdamRange<AdamStorage::bf16_stochastic>& r,
                                      const LambScalars<float>& s, float step_size, int64_t begin,
                                      int64_t end, const uint16_t* random16) {
  const AdamRange<AdamStorage::bf16_stochastic> range = r;
  const LambScalars<float> scalars = s;
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) update_element(range, i, scalars, step_size, random16[i - begin]);
}

// The specified order; most tensors have one unit, whose sum is then the tensor's.
double sum_of_units(const double* partials, int64_t count) {
  return count == 1 ? partials[0] : sum_partials(partials, count);
}

}  // namespace

const LambLoops kLambLoops{lamb_moments_cpu, lamb_update_cpu, lamb_cuda};

void lamb_moments_cpu(AdamStorage storage, const Tile& unit, const AdamTensor* tensors,
                      const AdamGradient* gradients, const StepScalars* scalars, double* parameter_partial,
                      double* update_partial) {
  const AdamGradient& gradient = gradients[unit.tensor];
  if (gradient.gradient == nullptr) return;
  const FullDenormals full_denormals;
  with_storage(storage, [&](auto chosen) {
    const auto& mine = scalars_of<chosen()>(gradient, scalars);
    if (mine.skip) return;
    moments_of_unit(range_of<chosen()>(unit, tensors[unit.tensor], gradient.gradient), mine,
                    parameter_partial, update_partial);
  });
}

void lamb_ratio_cpu(AdamStorage storage, const TileRange& units, const AdamGradient& gradient,
                    const StepScalars* scalars, const LambPartials& partials, LambRatio* ratio,
                    LambAverage* average) {
  if (gradient.gradient == nullptr) return;
  const FullDenormals full_denormals;
  const double parameter_squares = sum_of_units(partials.parameter + units.first, units.count);
  const double update_squares = sum_of_units(partials.update + units.first, units.count);
  with_storage(storage, [&](auto chosen) {
    const auto& mine = scalars_of<chosen()>(gradient, scalars);
    if (!mine.skip) *ratio = lamb_ratio(parameter_squares, update_squares, mine, average);
  });
}

void lamb_update_cpu(AdamStorage storage, const Tile& tile, const AdamTensor* tensors,
                     const AdamGradient* gradients, const StepScalars* scalars, const LambRatio* ratios) {
  const AdamGradient& gradient = gradients[tile.tensor];
  if (gradient.gradient == nullptr) return;
  const FullDenormals full_denormals;
  with_storage(storage, [&](auto chosen) {
    constexpr AdamStorage kStorage = chosen();
    const auto& mine = scalars_of<kStorage>(gradient, scalars);
    if (mine.skip) return;
    const auto range = range_of<kStorage>(tile, tensors[tile.tensor], gradient.gradient);
    const auto step_size = static_cast<typename StorageOf<kStorage>::Real>(ratios[tile.tensor].step_size);
    if constexpr (kStorage == AdamStorage::bf16_stochastic) {
      for_each_drawn_block(range, mine, [&](int64_t begin, int64_t end, const uint16_t* random16) {
        update_block(range, mine, step_size, begin, end, random16);
      });
    } else {
      update_range(range, mine, step_size);
    }
  });
}

}  // namespace pacer::kernels
