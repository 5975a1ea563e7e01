// The CPU loops of 1-bit Adam. A row of momentum is decoded into the level-1 cache and used at once, so that
// the bits and no fp32 copy of them come from memory.
#include <pacer/kernels/onebit_adam.h>

#include <algorithm>
#include <cstring>

#include <pacer/kernels/cpu/onebit_parameters.h>
#include <pacer/kernels/cpu/target.h>

namespace pacer::kernels {
namespace {

constexpr int64_t kPrefetched = 16;  // elements of 4 bytes in a cache line

template <class Element>
PACER_TARGET_CLONES void add_gradient(const Element* gradient, const MomentScalars<float>& s, int64_t count,
                                      float* momentum) {
  const MomentScalars<float> scalars = s;
  int64_t begin = 0;
  for (; begin + kPrefetched <= count; begin += kPrefetched) {
    __builtin_prefetch(gradient + begin + kOneBitRow);
#pragma omp simd
    for (int64_t i = begin; i < begin + kPrefetched; ++i) {
      momentum[i] = onebit_momentum(load(gradient[i]), momentum[i], scalars);
    }
  }
#pragma omp simd
  for (int64_t i = begin; i < count; ++i) {
    momentum[i] = onebit_momentum(load(gradient[i]), momentum[i], scalars);
  }
}

PACER_TARGET_CLONES void decay_momentum(const MomentScalars<float>& s, int64_t count, float* momentum) {
  const MomentScalars<float> scalars = s;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) momentum[i] = onebit_momentum(0.0f, momentum[i], scalars);
}

template <class Element>
PACER_TARGET_CLONES void refresh(const Element* gradient, const OneBitAdamTensor& t,
                                 const AdamScalars<float>& s, int64_t count, float* variance) {
  const AdamScalars<float> scalars = s;
  const VarianceRefresh amount = t.refresh;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    variance[i] = refreshed_variance(load(gradient[i]), variance[i], scalars, amount);
  }
}

PACER_TARGET_CLONES void refresh_without_gradient(const OneBitAdamTensor& t, const AdamScalars<float>& s,
                                                  int64_t count, float* variance) {
  const AdamScalars<float> scalars = s;
  const VarianceRefresh amount = t.refresh;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) variance[i] = refreshed_variance(0.0f, variance[i], scalars, amount);
}

template <AdamStorage kStorage>
PACER_TARGET_CLONES void update(const OneBitAdamTensor& t, const AdamScalars<float>& s,
                                const FrozenBounds& of_tensor, int64_t offset, int64_t count,
                                const float* momentum, const float* variance) {
  const OneBitParameters<kStorage> parameters(t, offset);
  const AdamScalars<float> scalars = s;
  const FrozenBounds bounds = of_tensor;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    parameters.store_value(i, frozen_step(parameters.value(i), momentum[i], variance[i], bounds, scalars));
  }
}

PACER_TARGET_CLONES void multiply(float* values, int64_t count, float factor) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] = values[i] * factor;
}
PACER_TARGET_CLONES void divide(float* values, int64_t count, float divisor) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] = values[i] / divisor;
}

// visit(gradient of the piece's first element), typed; the tensor has one.
template <class Visit>
void with_gradient(const OneBitAdamTensor& tensor, int64_t offset, const Visit& visit) {
  with_compressible(tensor.storage, [&](auto chosen) {
    visit(static_cast<const typename StorageOf<chosen()>::Param*>(tensor.gradient) + offset);
  });
}

void update_piece(const OneBitAdamWork& work, const OneBitPiece& piece, const float* momentum) {
  const OneBitAdamTensor& tensor = work.tensors[piece.tensor];
  if (work.moments_of(tensor).skip) return;
  with_compressible(tensor.storage, [&](auto chosen) {
    update<chosen()>(tensor, work.scalars_of(tensor), work.bounds_of(piece.tensor), piece.offset, piece.count,
                     momentum, work.variance + piece.position);
  });
}

int64_t width_of(const OneBitAdamRows& rows, int64_t row) {
  return std::min(kOneBitRow, rows.extent - row * kOneBitRow);
}

// f(row, width) for the rows of a unit.
template <class F>
void for_rows(const OneBitAdamRows& rows, int64_t unit, const F& f) {
  const FullDenormals full_denormals;
  const int64_t end = std::min(rows.rows, (unit + 1) * kOneBitUnitRows);
  for (int64_t row = unit * kOneBitUnitRows; row < end; ++row) f(row, width_of(rows, row));
}

// f(piece, its tensor, its first element's place in the row).
template <class F>
void for_pieces(const OneBitAdamRows& rows, int64_t row, const F& f) {
  for (int64_t i = rows.first[row]; i < rows.first[row + 1]; ++i) {
    const OneBitPiece& piece = rows.pieces[i];
    f(piece, rows.work.tensors[piece.tensor], piece.position - row * kOneBitRow);
  }
}

// `keeps_skipped`: tensors that sit the step out keep their momentum.
void momentum_row(const OneBitAdamRows& rows, int64_t row, int64_t width, bool keeps_skipped, float* values) {
  onebit_read_momentum(rows, row, width, values);
  for_pieces(rows, row, [&](const OneBitPiece& piece, const OneBitAdamTensor& tensor, int64_t place) {
    const MomentScalars<float>& scalars = rows.work.moments_of(tensor);
    if (keeps_skipped && scalars.skip) return;
    if (tensor.gradient == nullptr) return decay_momentum(scalars, piece.count, values + place);
    with_gradient(tensor, piece.offset, [&](const auto* gradient) {
      add_gradient(gradient, scalars, piece.count, values + place);
    });
  });
}

}  // namespace

void onebit_read_momentum(const OneBitAdamRows& rows, int64_t row, int64_t width, float* values) {
  if (rows.work.dense_momentum != nullptr) {
    std::memcpy(values, rows.work.dense_momentum + row * kOneBitRow,
                static_cast<size_t>(width) * sizeof(float));
    return;
  }
  decode_buffer_cpu(rows.work.bits, row * kOneBitRow, width, values);
  if (rows.work.momentum_scales == nullptr) return;
  for_pieces(rows, row, [&](const OneBitPiece& piece, const OneBitAdamTensor&, int64_t place) {
    divide(values + place, piece.count, rows.work.momentum_scales[piece.tensor]);
  });
}

void onebit_momentum_row(const OneBitAdamRows& rows, int64_t row, int64_t width, float* values) {
  momentum_row(rows, row, width, /*keeps_skipped=*/false, values);
  if (rows.work.momentum_scales == nullptr) return;
  for_pieces(rows, row, [&](const OneBitPiece& piece, const OneBitAdamTensor&, int64_t place) {
    multiply(values + place, piece.count, rows.work.momentum_scales[piece.tensor]);
  });
}

void onebit_dense_momentum_cpu(const OneBitAdamRows& rows, int64_t unit, float* momentum) {
  alignas(64) float values[kOneBitRow];
  for_rows(rows, unit, [&](int64_t row, int64_t width) {
    momentum_row(rows, row, width, /*keeps_skipped=*/true, values);
    float* to = momentum + row * kOneBitRow;
    std::fill(to, to + width, 0.0f);
    for_pieces(rows, row, [&](const OneBitPiece& piece, const OneBitAdamTensor&, int64_t place) {
      std::memcpy(to + place, values + place, piece.count * sizeof(float));
    });
  });
}

void onebit_refresh_cpu(const OneBitAdamRows& rows, int64_t unit) {
  for_rows(rows, unit, [&](int64_t row, int64_t) {
    for_pieces(rows, row, [&](const OneBitPiece& piece, const OneBitAdamTensor& tensor, int64_t) {
      const AdamScalars<float>& scalars = rows.work.scalars_of(tensor);
      if (scalars.skip) return;
      float* variance = rows.work.variance + piece.position;
      if (tensor.gradient == nullptr) return refresh_without_gradient(tensor, scalars, piece.count, variance);
      with_gradient(tensor, piece.offset,
                    [&](const auto* gradient) { refresh(gradient, tensor, scalars, piece.count, variance); });
    });
  });
}

void onebit_update_cpu(const OneBitAdamRows& rows, int64_t unit) {
  alignas(64) float momentum[kOneBitRow];
  for_rows(rows, unit, [&](int64_t row, int64_t width) {
    onebit_read_momentum(rows, row, width, momentum);
    for_pieces(rows, row, [&](const OneBitPiece& piece, const OneBitAdamTensor&, int64_t place) {
      update_piece(rows.work, piece, momentum + place);
    });
  });
}

}  // namespace pacer::kernels
