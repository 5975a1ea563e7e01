// The CPU loops of 1-bit LAMB. Momentum is decoded into the level-1 cache, a row of a unit at a time.
#include <pacer/kernels/onebit_lamb.h>

#include <algorithm>
#include <cstring>

#include <pacer/core/reduction_order.h>
#include <pacer/kernels/cpu/fold_columns.h>
#include <pacer/kernels/cpu/onebit_parameters.h>
#include <pacer/kernels/cpu/target.h>

namespace pacer::kernels {
namespace {

constexpr int64_t kBits = 8;  // elements that are decoded together

// Some consecutive elements of a tensor, no more than a row.
struct Span {
  const OneBitAdamTensor* tensor;
  int64_t offset;    // of the first in the tensor
  int64_t position;  // and in the buffer
  int64_t count;
};

PACER_TARGET_CLONES void undo_scale(float* values, int64_t count, float scale) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] = values[i] / scale;
}

// Only padding lies between the last element and the next multiple of kBits.
void read_momentum(const float* dense, const OneBitMessages& bits, float scale, const Span& span,
                   float* values) {
  if (dense != nullptr) {
    std::memcpy(values, dense + span.position, static_cast<size_t>(span.count) * sizeof(float));
    return;
  }
  decode_buffer_cpu(bits, span.position, round_up(span.count, kBits), values);
  undo_scale(values, span.count, scale);
}

struct Rows {
  alignas(64) float momentum[kReductionColumns];
  alignas(64) float before[kReductionColumns];
};
struct Columns {
  alignas(64) float direction[kReductionColumns] = {};
  alignas(64) float update[kReductionColumns] = {};
  alignas(64) float ratio[kReductionColumns] = {};
};

template <AdamStorage kStorage>
PACER_TARGET_CLONES void moments_of_row(const Span& span, const LambScalars<float>& s,
                                        const FrozenBounds& of_tensor, const Rows& rows,
                                        const float* variance, float* fresh, Columns& columns) {
  const LambScalars<float> scalars = s;
  const FrozenBounds bounds = of_tensor;
  const OneBitParameters<kStorage> parameters(*span.tensor, span.offset);
#pragma omp simd
  for (int64_t i = 0; i < span.count; ++i) {
    fresh[i] = fresh_variance(fresh[i], fresh_share(rows.momentum[i], rows.before[i], scalars), scalars);
    const float denominator = frozen_denominator(variance[i], bounds, scalars.epsilon);
    const float direction =
        lamb_direction(frozen_direction(rows.momentum[i], variance[i], denominator, bounds), scalars);
    const float update = lamb_update(direction, parameters.value(i), scalars);
    const float ratio = denominator_ratio(denominator, fresh[i], scalars);
    columns.direction[i] = fma_(direction, direction, columns.direction[i]);
    columns.update[i] = fma_(update, update, columns.update[i]);
    columns.ratio[i] = ratio > columns.ratio[i] ? ratio : columns.ratio[i];
  }
}

template <AdamStorage kStorage>
PACER_TARGET_CLONES void update_row(const Span& span, const LambScalars<float>& s,
                                    const FrozenBounds& of_tensor, float step_size, const float* momentum,
                                    const float* variance) {
  const LambScalars<float> scalars = s;
  const FrozenBounds bounds = of_tensor;
  const OneBitParameters<kStorage> parameters(*span.tensor, span.offset);
#pragma omp simd
  for (int64_t i = 0; i < span.count; ++i) {
    const float parameter = parameters.value(i);
    const float denominator = frozen_denominator(variance[i], bounds, scalars.epsilon);
    const float direction = frozen_direction(momentum[i], variance[i], denominator, bounds);
    const float update = lamb_update(lamb_direction(direction, scalars), parameter, scalars);
    parameters.store_value(i, fma_(-step_size, update, parameter));
  }
}

// f(span) for the rows of a unit.
template <class F>
void for_rows(const OneBitLambWork& work, const Tile& unit, const F& f) {
  const OneBitAdamTensor& tensor = work.now.tensors[unit.tensor];
  for (int64_t row = 0; row < unit.count; row += kReductionColumns) {
    const int64_t offset = unit.offset + row;
    f(Span{&tensor, offset, tensor.begin + offset, std::min(kReductionColumns, unit.count - row)});
  }
}

float scale_of(const OneBitLambWork& work, uint32_t tensor) {
  return work.now.momentum_scales == nullptr ? 1.0f : work.now.momentum_scales[tensor];
}

}  // namespace

void onebit_lamb_moments_cpu(const OneBitLambWork& work, const Tile& unit, int64_t index) {
  const FullDenormals full_denormals;
  const OneBitAdamTensor& tensor = work.now.tensors[unit.tensor];
  const auto& scalars = work.now.scalars_of<LambScalars<float>>(tensor);
  if (scalars.skip) return;
  const float scale = scale_of(work, unit.tensor);
  const FrozenBounds bounds = work.now.bounds_of(unit.tensor);
  Rows rows;
  Columns columns;
  for_rows(work, unit, [&](const Span& span) {
    read_momentum(work.now.dense_momentum, work.now.bits, scale, span, rows.momentum);
    read_momentum(work.dense_before, work.bits_before, scale, span, rows.before);
    with_compressible(tensor.storage, [&](auto chosen) {
      moments_of_row<chosen()>(span, scalars, bounds, rows, work.now.variance + span.position,
                               work.fresh_variance + span.position, columns);
    });
  });
  work.partials.ratio[index] = *std::max_element(columns.ratio, columns.ratio + kReductionColumns);
  work.partials.direction[index] = static_cast<double>(fold_columns_cpu(columns.direction));
  work.partials.update[index] = static_cast<double>(fold_columns_cpu(columns.update));
}

void onebit_lamb_factor_cpu(const OneBitLambWork& work, int64_t tensor) {
  const FullDenormals full_denormals;
  const auto& [units, bounds] = work.tensors[tensor];
  const auto& scalars = work.now.scalars_of<LambScalars<float>>(work.now.tensors[tensor]);
  if (units.count == 0 || scalars.skip) return;
  const float* ratios = work.partials.ratio + units.first;
  const float largest = *std::max_element(ratios, ratios + units.count);
  const double factor = lamb_factor(
      static_cast<double>(largest), sum_partials(work.partials.direction + units.first, units.count),
      sum_partials(work.partials.update + units.first, units.count), work.factors[tensor], bounds, scalars);
  work.factors[tensor] = factor;
  work.step_sizes[tensor] = lamb_step_size(work.coefficients[tensor], factor, scalars);
}

void onebit_lamb_update_cpu(const OneBitLambWork& work, const Tile& unit) {
  const FullDenormals full_denormals;
  const OneBitAdamTensor& tensor = work.now.tensors[unit.tensor];
  const auto& scalars = work.now.scalars_of<LambScalars<float>>(tensor);
  if (scalars.skip) return;
  const float scale = scale_of(work, unit.tensor);
  const FrozenBounds bounds = work.now.bounds_of(unit.tensor);
  alignas(64) float momentum[kReductionColumns];
  for_rows(work, unit, [&](const Span& span) {
    read_momentum(work.now.dense_momentum, work.now.bits, scale, span, momentum);
    with_compressible(tensor.storage, [&](auto chosen) {
      update_row<chosen()>(span, scalars, bounds, work.step_sizes[unit.tensor], momentum,
                           work.now.variance + span.position);
    });
  });
}

}  // namespace pacer::kernels
