// The CPU side of a 1-bit exchange. A row (2,048 elements) passes through the level-1 cache once: value and
// error are added, padding is zeroed, the scale's columns take their terms, and the signs are packed.
#include <pacer/kernels/onebit.h>

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <pacer/kernels/cpu/target.h>

namespace pacer::kernels {
namespace {

constexpr int kByte = 8;  // signs

OneBitHeader header_of(const unsigned char* message) {
  OneBitHeader header;
  std::memcpy(&header, message, sizeof header);
  return header;
}

// Of the row in which the element lies.
float scale_at(const OneBitMessages& messages, const unsigned char* message, int64_t position) {
  if (!messages.rows_scaled) return header_of(message).scale;
  float scale;
  std::memcpy(&scale, message + sizeof(OneBitHeader) + 4 * (position / kOneBitRow), sizeof scale);
  return scale;
}

const unsigned char* signs_of(const OneBitMessages& messages, const unsigned char* message) {
  return message + messages.stride - messages.chunk / kByte;
}

// Elements from `position` that share a scale.
int64_t span_at(const OneBitMessages& messages, int64_t position) {
  return messages.rows_scaled ? kOneBitRow - position % kOneBitRow : messages.chunk - position;
}

PACER_TARGET_CLONES void decode(const unsigned char* signs, int64_t count, float scale, float* values) {
  for (int64_t j = 0; j < count / kByte; ++j) {
    const uint32_t byte = signs[j];
#pragma omp simd
    for (uint32_t b = 0; b < kByte; ++b) values[kByte * j + b] = decode_sign((byte >> b) & 1u, scale);
  }
}

PACER_TARGET_CLONES void decode_and_add(const unsigned char* signs, int64_t count, float scale,
                                        float* values) {
  for (int64_t j = 0; j < count / kByte; ++j) {
    const uint32_t byte = signs[j];
#pragma omp simd
    for (uint32_t b = 0; b < kByte; ++b) values[kByte * j + b] += decode_sign((byte >> b) & 1u, scale);
  }
}

PACER_TARGET_CLONES void add_errors(const float* carried, float scale, int64_t count, float* values) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] += onebit_error(carried[i], scale);
}

// values[i] = 0 for all i of the row that are no real elements.
void clear_padding(const OneBitSide& side, int64_t row, int64_t width, float* values) {
  int64_t end = row * kOneBitRow;
  const int64_t row_begin = end;
  for (int64_t i = side.first[row]; i < side.first[row + 1]; ++i) {
    const OneBitPiece& piece = side.pieces[i];
    std::fill(values + (end - row_begin), values + (piece.position - row_begin), 0.0f);
    end = piece.position + piece.count;
  }
  std::fill(values + (end - row_begin), values + width, 0.0f);
}

template <ScaleNorm kNorm>
PACER_TARGET_CLONES void add_terms(const float* values, int64_t count, float* columns) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) columns[i] = add_to_scale(kNorm, values[i], columns[i]);
}

// `count` is a multiple of 8.
void pack(const float* values, int64_t count, unsigned char* signs) {
  for (int64_t j = 0; j < count / kByte; ++j) {
    const float* eight = values + kByte * j;
#if defined(__SSE2__)
    const __m128 zero = _mm_setzero_ps();
    const int low = _mm_movemask_ps(_mm_cmplt_ps(_mm_loadu_ps(eight), zero));
    const int high = _mm_movemask_ps(_mm_cmplt_ps(_mm_loadu_ps(eight + 4), zero));
    signs[j] = static_cast<unsigned char>(~(low | high << 4));
#else
    unsigned byte = 0;
    for (unsigned b = 0; b < kByte; ++b) byte |= (eight[b] < 0 ? 0u : 1u) << b;
    signs[j] = static_cast<unsigned char>(byte);
#endif
  }
}

int64_t width_of(const OneBitSide& side, int64_t row) {
  return std::min(kOneBitRow, side.extent - row * kOneBitRow);
}

float side_scale(const OneBitSide& side, int64_t row) { return side.scales[side.rows_scaled ? row : 0]; }

}  // namespace

void decode_buffer_cpu(const OneBitMessages& messages, int64_t position, int64_t count, float* values) {
  for (int64_t done = 0; done < count;) {
    const int64_t chunk = (position + done) / messages.chunk, inside = (position + done) % messages.chunk;
    const int64_t width = std::min(count - done, span_at(messages, inside));
    const unsigned char* message = messages.data + chunk * messages.stride;
    decode(signs_of(messages, message) + inside / kByte, width, scale_at(messages, message, inside),
           values + done);
    done += width;
  }
}

void decode_mean_cpu(const OneBitMessages& messages, int64_t position, int64_t count, float* values) {
  const auto average = static_cast<float>(1.0 / static_cast<double>(messages.world_size));
  for (int64_t rank = 0; rank < messages.world_size; ++rank) {
    const unsigned char* message = messages.data + rank * messages.stride;
    const unsigned char* signs = signs_of(messages, message);
    for (int64_t done = 0; done < count;) {
      const int64_t from = position + done;
      const int64_t width = std::min(count - done, span_at(messages, from));
      const float weight = mul_(scale_at(messages, message, from), average);
      const auto step = rank == 0 ? decode : decode_and_add;
      step(signs + from / kByte, width, weight, values + done);
      done += width;
    }
  }
}

void onebit_compress_cpu(const OneBitSide& side, OneBitSource source, const void* context, int64_t unit,
                         double* sums) {
  const FullDenormals full_denormals;
  alignas(64) float values[kOneBitRow];
  alignas(64) float columns[kReductionColumns] = {};
  const int64_t end = std::min(side.rows, (unit + 1) * kOneBitUnitRows);
  for (int64_t row = unit * kOneBitUnitRows; row < end; ++row) {
    const int64_t width = width_of(side, row);
    float* carried = side.carried + row * kOneBitRow;
    source(context, row, width, values);
    add_errors(carried, side_scale(side, row), width, values);
    clear_padding(side, row, width, values);
    std::copy(values, values + width, carried);
    side.norm == ScaleNorm::rms ? add_terms<ScaleNorm::rms>(values, width, columns)
                                : add_terms<ScaleNorm::l1>(values, width, columns);
    pack(values, width, side.signs + row * kOneBitRow / kByte);
    if (side.rows_scaled) {
      sums[row] = static_cast<double>(fold_columns(columns));
      std::fill(columns, columns + kReductionColumns, 0.0f);
    }
  }
  if (!side.rows_scaled) sums[unit] = static_cast<double>(fold_columns(columns));
}

float onebit_scale_cpu(ScaleNorm norm, double sum, int64_t count) {
  const FullDenormals full_denormals;
  return onebit_scale(norm, sum, count);
}

void onebit_errors_cpu(const OneBitSide& side, int64_t row, float* errors) {
  const FullDenormals full_denormals;
  const int64_t width = width_of(side, row);
  std::fill(errors, errors + width, 0.0f);
  add_errors(side.carried + row * kOneBitRow, side_scale(side, row), width, errors);
  clear_padding(side, row, width, errors);
}

}  // namespace pacer::kernels
