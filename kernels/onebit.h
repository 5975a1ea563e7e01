// The two compressing kernels of a 1-bit exchange: what a rank does before its signs leave (the worker) and
// what it does for the chunk it serves (the server). Both read a row of numbers from a source, add the error
// they carry, and leave signs and sums. Raw pointers; on the CPU single-threaded, unit by unit; no LibTorch.
#pragma once

#include <cstdint>
#include <functional>

#include <pacer/kernels/math/gradient_guard.h>
#include <pacer/kernels/math/onebit.h>
#include <pacer/kernels/onebit_layout.h>
#include <pacer/kernels/stream.h>

namespace pacer::kernels {

// What travels in front of the signs of a chunk.
struct OneBitHeader {
  // The scale of all signs of the chunk. Where each row has a scale of its own, it is 0, or NaN if one of the
  // sender's is not finite.
  float scale;
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

// Whole packets of 16 bytes, so that every message and its signs begin where one does. Signs come last.
constexpr int64_t onebit_message_bytes(int64_t chunk, bool rows_scaled) {
  const int64_t scales = rows_scaled ? (chunk + kOneBitRow - 1) / kOneBitRow : 0;
  return static_cast<int64_t>(sizeof(OneBitHeader)) + (scales + 3) / 4 * 16 + chunk / 8;
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
using OneBitSource = std::function<void(int64_t row, int64_t width, float* values)>;

// Rows [kOneBitUnitRows * unit, ...): carried = value + error, 0 in the padding; their signs; and what scales
// are made of: sums[unit], or with rows_scaled sums[row].
void onebit_compress_cpu(const OneBitSide& side, const OneBitSource& source, int64_t unit, double* sums);

// onebit_scale, whatever the caller does with denormals.
float onebit_scale_cpu(ScaleNorm norm, double sum, int64_t count);

// errors[i] = what was lost of element position + i; the memory of padding gets 0.
void onebit_errors_cpu(const OneBitSide& side, int64_t row, float* errors);

// ---- CUDA: every pointer is device memory, work is enqueued on `stream`, nothing synchronises. ----
// The same bits as on the CPU.

// Why a compressed step cannot be used.
enum class OneBitFailure : uint32_t {
  none,
  other_call,  // signs of another step or call arrived
  not_finite,  // a scale of the mean is not finite
};

// What the device knows of an exchange; zeros at first.
struct OneBitStatus {
  OneBitFailure failure;  // once there is one, nothing changes any more
  uint32_t has_mean;      // 1: the messages gathered last are the newest mean
  uint32_t rank;          // of a failure: whose message it was, and what it said
  uint32_t step;
  uint32_t sequence;
};

// What decides whether kernels do anything: gradients that are finite, an exchange that has not failed.
struct OneBitControl {
  const GradientCheck* check;  // null: nobody looked
  OneBitStatus* status;        // null: there is no exchange
};

// One side of an exchange; element i of it is element origin + i of the buffer.
struct OneBitCudaSide {
  const uint32_t* tensors;  // of each kOneBitAlignment elements of the buffer: the tensor they belong to
  const int64_t* ends;      // of each tensor: where its elements end in the buffer
  int64_t origin;           // a multiple of kOneBitAlignment
  int64_t extent;           // elements
  int64_t real_elements;    // of them
  float* carried;           // as in OneBitSide
  float* scales;            // in: of the last call, out: of this one
  bool rows_scaled;
  ScaleNorm norm;
  unsigned char* messages;  // out: headers, scales and signs; element i is in message i / chunk
  int64_t stride;
  int64_t chunk;
  int64_t message_count;
  double* sums;  // scratch, one for each unit: of its terms; with rows_scaled 0, or NaN
};

// Which call of an exchange messages belong to.
struct OneBitCall {
  int64_t step;
  uint32_t sequence;
};

// The worker's side for values that lie in memory as they are: `values` has the elements of the only tensor.
void onebit_compress_values_cuda(const OneBitCudaSide& side, const float* values,
                                 const OneBitControl& control, Stream stream);
// The server's side: the mean over ranks of `parts`, each a rank's signs of this chunk.
void onebit_compress_mean_cuda(const OneBitCudaSide& side, const OneBitMessages& parts,
                               const OneBitControl& control, Stream stream);
// After either: from sums to scales, and the headers of the messages.
void onebit_finish_side_cuda(const OneBitCudaSide& side, const OneBitCall& call, const OneBitControl& control,
                             Stream stream);
// Notes a failure in the status where messages are of another call or, with `as_mean`, have scales that are
// not finite; otherwise, with `as_mean`, that the exchange has a mean.
void onebit_check_messages_cuda(const OneBitMessages& messages, const OneBitCall& call, bool as_mean,
                                const OneBitControl& control, Stream stream);
// From now on something newer than the messages is the mean.
void onebit_forget_mean_cuda(const OneBitControl& control, Stream stream);
// values[i] = element i of the buffer, i < count.
void onebit_decode_cuda(const OneBitMessages& messages, int64_t count, float* values,
                        const OneBitControl& control, Stream stream);

}  // namespace pacer::kernels
