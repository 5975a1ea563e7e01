// The CPU side of a 1-bit exchange. A row (2,048 elements) passes through the level-1 cache once: its source
// writes values there, and one loop adds the errors, packs the signs and feeds the scale's columns.
#include <pacer/kernels/onebit.h>

#include <algorithm>
#include <cstring>

#include <pacer/core/tile.h>
#include <pacer/kernels/cpu/fold_columns.h>
#include <pacer/kernels/cpu/onebit_signs.h>
#include <pacer/kernels/cpu/target.h>

namespace pacer::kernels {
namespace {

constexpr int kByte = kSignsInByte;
constexpr unsigned char kAllPlus = 0xFF;

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

PACER_TARGET_CLONES void add_errors(const float* carried, float scale, int64_t count, float* values) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] += onebit_error(carried[i], scale);
}

int64_t width_of(const OneBitSide& side, int64_t row) {
  return std::min(kOneBitRow, side.extent - row * kOneBitRow);
}

float side_scale(const OneBitSide& side, int64_t row) { return side.scales[side.rows_scaled ? row : 0]; }

// f(piece) for the real elements of the row.
template <class F>
void for_pieces(const OneBitSide& side, int64_t row, const F& f) {
  for (int64_t i = side.first[row]; i < side.first[row + 1]; ++i) f(side.pieces[i]);
}

// Padding: 0, with the sign of 0. The last byte of what lies before it is complete.
void clear_padding(const OneBitSide& side, int64_t begin, int64_t end) {
  std::fill(side.carried + begin, side.carried + end, 0.0f);
  std::fill(side.signs + ceil_divide(begin, kByte), side.signs + ceil_divide(end, kByte), kAllPlus);
}

// kFirst: the columns begin with this row.
template <bool kFirst>
void round_row(const OneBitSide& side, int64_t row, const float* values, float* columns) {
  const auto round = side.norm == ScaleNorm::rms ? round_to_signs<ScaleNorm::rms, kFirst>
                                                 : round_to_signs<ScaleNorm::l1, kFirst>;
  const float scale = side_scale(side, row);
  const int64_t begin = row * kOneBitRow;
  int64_t done = begin;
  const auto skip_to = [&](int64_t position) {
    clear_padding(side, done, position);
    if (kFirst) std::fill(columns + (done - begin), columns + (position - begin), 0.0f);
  };
  for_pieces(side, row, [&](const OneBitPiece& piece) {
    skip_to(piece.position);
    const int64_t place = piece.position - begin;
    round({values + place, scale, piece.count, side.carried + piece.position, columns + place,
           side.signs + piece.position / kByte});
    done = piece.position + piece.count;
  });
  skip_to(begin + width_of(side, row));
  if (kFirst) std::fill(columns + width_of(side, row), columns + kReductionColumns, 0.0f);
}

}  // namespace

void decode_buffer_cpu(const OneBitMessages& messages, int64_t position, int64_t count, float* values) {
  for (int64_t done = 0; done < count;) {
    const int64_t chunk = (position + done) / messages.chunk, inside = (position + done) % messages.chunk;
    const int64_t width = std::min(count - done, span_at(messages, inside));
    const unsigned char* message = messages.data + chunk * messages.stride;
    decode_signs<false>(signs_of(messages, message) + inside / kByte, width,
                        scale_at(messages, message, inside), values + done);
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
      const auto step = rank == 0 ? decode_signs<false> : decode_signs<true>;
      step(signs + from / kByte, width, weight, values + done);
      done += width;
    }
  }
}

void onebit_compress_cpu(const OneBitSide& side, const OneBitSource& source, int64_t unit, double* sums) {
  const FullDenormals full_denormals;
  alignas(64) float values[kOneBitRow];
  alignas(64) float columns[kReductionColumns];
  const int64_t begin = unit * kOneBitUnitRows, end = std::min(side.rows, begin + kOneBitUnitRows);
  for (int64_t row = begin; row < end; ++row) {
    source(row, width_of(side, row), values);
    row == begin || side.rows_scaled ? round_row<true>(side, row, values, columns)
                                     : round_row<false>(side, row, values, columns);
    if (side.rows_scaled) sums[row] = static_cast<double>(fold_columns_cpu(columns));
  }
  if (!side.rows_scaled) sums[unit] = static_cast<double>(fold_columns_cpu(columns));
}

float onebit_scale_cpu(ScaleNorm norm, double sum, int64_t count) {
  const FullDenormals full_denormals;
  return onebit_scale(norm, sum, count);
}

void onebit_errors_cpu(const OneBitSide& side, int64_t row, float* errors) {
  const FullDenormals full_denormals;
  const int64_t width = width_of(side, row);
  std::fill(errors, errors + width, 0.0f);
  for_pieces(side, row, [&](const OneBitPiece& piece) {
    add_errors(side.carried + piece.position, side_scale(side, row), piece.count,
               errors + (piece.position - row * kOneBitRow));
  });
}

}  // namespace pacer::kernels
