// The two compressing kernels of a 1-bit exchange: what a rank does before its signs leave (the worker) and
// what it does for the chunk it serves (the server). Both read a row of numbers from a source, add the error
// they carry, and leave signs and sums. Raw pointers, single-threaded, unit by unit; no LibTorch.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/onebit.h>
#include <pacer/kernels/onebit_layout.h>

namespace pacer::kernels {

// What travels in front of the signs of a chunk.
struct OneBitHeader {
  float scale;    // of all the chunk's signs; 0 where each row has its own
  uint32_t step;  // modulo 2^32, as is the sequence number of the call: both must be the receiver's own
  uint32_t sequence;
  uint32_t rows_scaled;  // 1: a scale for each row lies between header and signs
};
static_assert(sizeof(OneBitHeader) == 16);

// Messages of all ranks, one behind the other: header, row scales where there are some, signs. Element 8j + b
// of a chunk is bit b of byte j, 1 for plus.
struct OneBitMessages {
  const unsigned char* data = nullptr;
  int64_t stride = 0;  // bytes of a message
  int64_t world_size = 0;
  int64_t chunk = 0;  // elements of a message
  bool rows_scaled = false;
};

constexpr int64_t onebit_message_bytes(int64_t chunk, bool rows_scaled) {
  const int64_t scales = rows_scaled ? (chunk + kOneBitRow - 1) / kOneBitRow : 0;
  return static_cast<int64_t>(sizeof(OneBitHeader)) + 4 * scales + chunk / 8;
}

// values[i] = element position + i of the buffer whose chunk k is message k. `position` and `count` are
// multiples of 8.
void decode_buffer_cpu(const OneBitMessages& messages, int64_t position, int64_t count, float* values);

// values[i] = element position + i of the mean over messages, each a rank's signs of the same chunk: added in
// rank order, each scaled by (float)(scale * (float)(1 / world_size)).
void decode_mean_cpu(const OneBitMessages& messages, int64_t position, int64_t count, float* values);

// One side of an exchange: the worker's over the whole buffer, or the server's over its chunk.
struct OneBitSide {
  const OneBitPiece* pieces;  // of OneBitRows
  const int64_t* first;
  int64_t rows;
  int64_t extent;       // elements
  float* carried;       // value + error, `extent` elements, in and out
  const float* scales;  // with which `carried` was last rounded: one, or one for each row
  bool rows_scaled;
  ScaleNorm norm;
  unsigned char* signs;  // out, extent / 8 bytes
};

// Writes the values of the first `width` elements of row `row` to values[0 ... width); what padding gets is
// not looked at.
using OneBitSource = void (*)(const void* context, int64_t row, int64_t width, float* values);

// Rows [kOneBitUnitRows * unit, ...): carried = value + error, 0 in the padding; their signs; and what scales
// are made of: sums[unit], or with rows_scaled sums[row].
void onebit_compress_cpu(const OneBitSide& side, OneBitSource source, const void* context, int64_t unit,
                         double* sums);

// onebit_scale, whatever the caller does with denormals.
float onebit_scale_cpu(ScaleNorm norm, double sum, int64_t count);

// errors[i] = what was lost of element position + i; the memory of padding gets 0.
void onebit_errors_cpu(const OneBitSide& side, int64_t row, float* errors);

}  // namespace pacer::kernels
