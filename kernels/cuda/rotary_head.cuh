// A head in the registers of its lanes, each with eight channels of the first half and the eight that turn with them: where it
// lies in rows of heads, its norm and its rotation.
#pragma once

#include <pacer/kernels/rotary.h>

#include <pacer/kernels/cuda/layer_norm_row.cuh>

namespace pacer::kernels {

// What a lane has of the first half of a head's channels, or of the second.
using HeadEights = float[kLayerNormPiece];

// Where a thread stands in a head.
struct HeadLane {
  int lanes, lane, slot;
  __device__ __forceinline__ explicit HeadLane(int64_t head_dim)
      : lanes(rotary_lanes(head_dim)),
        lane(static_cast<int>(threadIdx.x) & (lanes - 1)),
        slot(static_cast<int>(threadIdx.x) / lanes) {}
  __device__ __forceinline__ int column() const { return lane * kLayerNormPiece; }
};

// The sum over a head of what its lanes have, in all of them. All threads of a warp call it.
__device__ __forceinline__ float sum_over_head(const float (&accumulators)[kLayerNormPiece], int lanes) {
  float sum = sum_of_eight(accumulators);
  for (int h = lanes / 2; h >= 1; h /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, h);
  return sum;
}

__device__ __forceinline__ float sum_of_head_products(const HeadEights& x1, const HeadEights& x2,
                                                      const HeadEights& y1, const HeadEights& y2, int lanes) {
  float accumulators[kLayerNormPiece];
#pragma unroll
  for (int k = 0; k < kLayerNormPiece; ++k) accumulators[k] = fma_(x2[k], y2[k], mul_(x1[k], y1[k]));
  return sum_over_head(accumulators, lanes);
}

// Turns what was read into what is normalised, and returns the factor; zeros stay zeros.
__device__ __forceinline__ float normalize_head(HeadEights& first, HeadEights& second, int64_t head_dim,
                                                float epsilon, int lanes) {
  const float sum = sum_of_head_products(first, second, first, second, lanes);
  const float rstd = rstd_of(sum, static_cast<float>(head_dim), epsilon);
#pragma unroll
  for (int k = 0; k < kLayerNormPiece; ++k) {
    first[k] = mul_(first[k], rstd);
    second[k] = mul_(second[k], rstd);
  }
  return rstd;
}

// Cosines and sines of a lane's pairs at one position.
struct HeadAngles {
  float cosines[kLayerNormPiece], sines[kLayerNormPiece];
};
__device__ __forceinline__ HeadAngles angles_at(const RotaryForward& work, unsigned row, int column) {
  const unsigned place = row % static_cast<unsigned>(work.sequence);
  const int64_t at = place * (work.head_dim / 2) + column;
  HeadAngles angles;
  read_parameter_piece(work.cosines + at, angles.cosines);
  read_parameter_piece(work.sines + at, angles.sines);
  return angles;
}

__device__ __forceinline__ void rotate_head(const HeadAngles& angles, float sign, HeadEights& first,
                                            HeadEights& second) {
#pragma unroll
  for (int k = 0; k < kLayerNormPiece; ++k) {
    const RotatedPair pair = rotated(first[k], second[k], angles.cosines[k], mul_(sign, angles.sines[k]));
    first[k] = pair.first;
    second[k] = pair.second;
  }
}

// What a lane has of a head, as it lies in memory.
template <class Element>
struct HeadPieces {
  LayerNormPiece<Element> first, second;
};
template <class Element>
__device__ __forceinline__ HeadPieces<Element> read_head(const void* memory, int64_t at, int64_t half) {
  const auto* head = static_cast<const Element*>(memory) + at;
  return {read_piece_once(head), read_piece_once(head + half)};
}
template <class Element>
__device__ __forceinline__ void unpack_head(const HeadPieces<Element>& pieces, HeadEights& first,
                                            HeadEights& second) {
  unpack_piece(pieces.first, first);
  unpack_piece(pieces.second, second);
}

template <class Element>
__device__ __forceinline__ void write_head(const HeadEights& first, const HeadEights& second, int64_t at,
                                           int64_t half, void* memory) {
  auto* head = static_cast<Element*>(memory) + at;
  write_piece(pack_piece<Element>(first), head);
  write_piece(pack_piece<Element>(second), head + half);
}

template <class Parameter>
__device__ __forceinline__ void read_weight(const void* weight, int column, int64_t half, HeadEights& first,
                                            HeadEights& second) {
  const auto* from = static_cast<const Parameter*>(weight) + column;
  read_parameter_piece(from, first);
  read_parameter_piece(from + half, second);
}

__device__ __forceinline__ void multiply(const HeadEights& x, HeadEights& to) {
#pragma unroll
  for (int k = 0; k < kLayerNormPiece; ++k) to[k] = mul_(to[k], x[k]);
}

// Where heads begin that are counted row by row, those of a row being queries, keys, and what is copied.
struct CountedHead {
  unsigned row, in_row;
  __device__ __forceinline__ CountedHead(unsigned number, unsigned of_row)
      : row(number / of_row), in_row(number % of_row) {}
  __device__ __forceinline__ void advance(unsigned of_row) {
    if (++in_row == of_row) in_row = 0, ++row;
  }
};

// One of the kinds of heads in a row, and the first channel of one of them in a row of its matrix.
struct HeadOfKind {
  const RotaryHeads* kind;
  bool is_copied;
  int64_t channel;
  __device__ __forceinline__ HeadOfKind(const RotaryForward& work, const RotaryHeads& copied,
                                        unsigned in_row) {
    const auto queries = static_cast<unsigned>(work.q.heads), keys = static_cast<unsigned>(work.k.heads);
    const bool is_query = in_row < queries;
    is_copied = in_row >= queries + keys;
    kind = is_query ? &work.q : is_copied ? &copied : &work.k;
    channel = (is_query ? in_row : is_copied ? in_row - queries - keys : in_row - queries) * work.head_dim;
  }
};

}  // namespace pacer::kernels
