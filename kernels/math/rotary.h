// The rotation of a pair of channels by its position, written once for the host and the device, and the order
// of sums over a head and over heads, which is part of the definition:
//
//   head      the pair of channels i and i + head_dim / 2 adds its first, then its second term to accumulator i,
//             each by one fused multiply-add; then eights and folds as in kernels/math/layer_norm.h, over
//             rotary_lanes(head_dim) lanes
//   weights   of a gradient of a norm's weight: heads of a part, row by row, are counted, and the one of number n
//             adds to slot n mod rotary_slots(head_dim), ascending; slots are folded; parts as in layer_norm.h
#pragma once

#include <cstdint>

#include <pacer/core/tile.h>
#include <pacer/kernels/math/layer_norm.h>

namespace pacer::kernels {

constexpr int64_t kRotaryMostChannels = 512;  // of a head
constexpr int kRotaryThreads = 256;           // of a block on a GPU, which slots follow from

// Lanes of eight pairs each that share a head: a power of two.
PACER_HOST_DEVICE int rotary_lanes(int64_t head_dim) {
  int lanes = 1;
  while (int64_t{2} * kLayerNormPiece * lanes < head_dim) lanes *= 2;
  return lanes;
}
PACER_HOST_DEVICE int rotary_slots(int64_t head_dim) { return kRotaryThreads / rotary_lanes(head_dim); }

// Rows that add up to one partial sum of the gradients of weights, the last part may have less.
inline int64_t rotary_part_rows(int64_t rows) {
  constexpr int64_t kMost = 1024;
  return rows <= kMost ? 1 : ceil_divide(rows, kMost);
}
inline int64_t rotary_parts(int64_t rows) { return ceil_divide(rows, rotary_part_rows(rows)); }

struct RotatedPair {
  float first, second;
};
// Returns the pair turned by the angle of this cosine and sine; -sine turns it back.
PACER_HOST_DEVICE RotatedPair rotated(float first, float second, float cosine, float sine) {
  return {fma_(first, cosine, mul_(-second, sine)), fma_(second, cosine, mul_(first, sine))};
}

}  // namespace pacer::kernels
