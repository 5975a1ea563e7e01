// The CPU loops of 1-bit Adam. A row of momentum is decoded into the level-1 cache and used at once, so that
// the bits and no fp32 copy of them come from memory.
#include <pacer/kernels/onebit_adam.h>

#include <algorithm>
#include <cstring>

#include <pacer/kernels/cpu/target.h>

namespace pacer::kernels {
namespace {

template <class Element>
PACER_TARGET_CLONES void add_gradient(const Element* gradient, const AdamScalars<float>& s, int64_t count,
                                      float* momentum) {
  const AdamScalars<float> scalars = s;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) momentum[i] = onebit_momentum(load(gradient[i]), momentum[i], scalars);
}

PACER_TARGET_CLONES void decay_momentum(const AdamScalars<float>& s, int64_t count, float* momentum) {
  const AdamScalars<float> scalars = s;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) momentum[i] = onebit_momentum(0.0f, momentum[i], scalars);
}

template <class Element>
PACER_TARGET_CLONES void refresh(const Element* gradient, const OneBitAdamTensor& t, int64_t count,
                                 float* variance) {
  const AdamScalars<float> scalars = t.scalars;
  const VarianceRefresh amount = t.refresh;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    variance[i] = refreshed_variance(load(gradient[i]), variance[i], scalars, amount);
  }
}

PACER_TARGET_CLONES void refresh_without_gradient(const OneBitAdamTensor& t, int64_t count, float* variance) {
  const AdamScalars<float> scalars = t.scalars;
  const VarianceRefresh amount = t.refresh;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) variance[i] = refreshed_variance(0.0f, variance[i], scalars, amount);
}

template <AdamStorage kStorage>
PACER_TARGET_CLONES void update(const OneBitAdamTensor& t, int64_t offset, int64_t count,
                                const float* momentum, const float* variance) {
  using Types = StorageOf<kStorage>;
  auto* parameter = static_cast<typename Types::Param*>(t.parameter) + offset;
  auto* extra = static_cast<typename Types::Extra*>(t.extra);
  if constexpr (Types::kHasExtra) extra += offset;
  const AdamScalars<float> scalars = t.scalars;
  const float floor = t.floor;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    StoredElement<kStorage> e{};
    e.parameter = parameter[i];
    if constexpr (Types::kHasExtra) e.extra = extra[i];
    const float value = frozen_step(load_parameter(e), momentum[i], variance[i], floor, scalars);
    store_parameter(value, 0, e);
    parameter[i] = e.parameter;
    if constexpr (Types::kHasExtra) extra[i] = e.extra;
  }
}

// visit(gradient of the piece's first element), typed; the tensor has one.
template <class Visit>
void with_gradient(const OneBitAdamTensor& tensor, int64_t offset, const Visit& visit) {
  switch (tensor.storage) {
    case AdamStorage::f16_master:
      return visit(static_cast<const Float16*>(tensor.gradient) + offset);
    case AdamStorage::bf16_master:
    case AdamStorage::bf16_remainder:
      return visit(static_cast<const BFloat16*>(tensor.gradient) + offset);
    default:
      return visit(static_cast<const float*>(tensor.gradient) + offset);
  }
}

void update_piece(const OneBitAdamTensor& tensor, int64_t offset, int64_t count, const float* momentum,
                  const float* variance) {
  switch (tensor.storage) {
    case AdamStorage::f16_master:
      return update<AdamStorage::f16_master>(tensor, offset, count, momentum, variance);
    case AdamStorage::bf16_master:
      return update<AdamStorage::bf16_master>(tensor, offset, count, momentum, variance);
    case AdamStorage::bf16_remainder:
      return update<AdamStorage::bf16_remainder>(tensor, offset, count, momentum, variance);
    default:
      return update<AdamStorage::f32>(tensor, offset, count, momentum, variance);
  }
}

int64_t width_of(const OneBitAdamWork& work, int64_t row) {
  return std::min(kOneBitRow, work.extent - row * kOneBitRow);
}

// f(row, width) for the rows of a unit.
template <class F>
void for_rows(const OneBitAdamWork& work, int64_t unit, const F& f) {
  const FullDenormals full_denormals;
  const int64_t end = std::min(work.rows, (unit + 1) * kOneBitUnitRows);
  for (int64_t row = unit * kOneBitUnitRows; row < end; ++row) f(row, width_of(work, row));
}

// f(piece, its tensor, its first element's place in the row).
template <class F>
void for_pieces(const OneBitAdamWork& work, int64_t row, const F& f) {
  for (int64_t i = work.first[row]; i < work.first[row + 1]; ++i) {
    const OneBitPiece& piece = work.pieces[i];
    f(piece, work.tensors[piece.tensor], piece.position - row * kOneBitRow);
  }
}

}  // namespace

void onebit_read_momentum(const OneBitAdamWork& work, int64_t row, int64_t width, float* values) {
  if (work.dense_momentum != nullptr) {
    std::memcpy(values, work.dense_momentum + row * kOneBitRow, static_cast<size_t>(width) * sizeof(float));
  } else {
    decode_buffer_cpu(work.bits, row * kOneBitRow, width, values);
  }
}

void onebit_momentum_row(const void* context, int64_t row, int64_t width, float* values) {
  const auto& work = *static_cast<const OneBitAdamWork*>(context);
  onebit_read_momentum(work, row, width, values);
  for_pieces(work, row, [&](const OneBitPiece& piece, const OneBitAdamTensor& tensor, int64_t place) {
    if (tensor.gradient == nullptr) return decay_momentum(tensor.scalars, piece.count, values + place);
    with_gradient(tensor, piece.offset, [&](const auto* gradient) {
      add_gradient(gradient, tensor.scalars, piece.count, values + place);
    });
  });
}

void onebit_dense_momentum_cpu(const OneBitAdamWork& work, int64_t unit, float* momentum) {
  alignas(64) float values[kOneBitRow];
  for_rows(work, unit, [&](int64_t row, int64_t width) {
    onebit_momentum_row(&work, row, width, values);
    float* to = momentum + row * kOneBitRow;
    std::fill(to, to + width, 0.0f);
    for_pieces(work, row, [&](const OneBitPiece& piece, const OneBitAdamTensor&, int64_t place) {
      std::memcpy(to + place, values + place, piece.count * sizeof(float));
    });
  });
}

void onebit_refresh_cpu(const OneBitAdamWork& work, int64_t unit) {
  for_rows(work, unit, [&](int64_t row, int64_t) {
    for_pieces(work, row, [&](const OneBitPiece& piece, const OneBitAdamTensor& tensor, int64_t) {
      float* variance = work.variance + piece.position;
      if (tensor.gradient == nullptr) return refresh_without_gradient(tensor, piece.count, variance);
      with_gradient(tensor, piece.offset,
                    [&](const auto* gradient) { refresh(gradient, tensor, piece.count, variance); });
    });
  });
}

void onebit_update_cpu(const OneBitAdamWork& work, int64_t unit) {
  alignas(64) float momentum[kOneBitRow];
  for_rows(work, unit, [&](int64_t row, int64_t width) {
    onebit_read_momentum(work, row, width, momentum);
    for_pieces(work, row, [&](const OneBitPiece& piece, const OneBitAdamTensor& tensor, int64_t place) {
      update_piece(tensor, piece.offset, piece.count, momentum + place, work.variance + piece.position);
    });
  });
}

}  // namespace pacer::kernels
