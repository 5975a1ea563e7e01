// NF4: numbers in 4 bits, for blocks of 64 that share a scale, the largest magnitude of the block ("absmax")
// (Dettmers et al., "QLoRA", arXiv:2305.14314). The book has eight positive quantiles of the normal
// distribution, seven negative ones and 0, divided by the largest. Double quantisation stores the scales in 8
// bits as well: their distance from their mean ("offset"), in blocks of 256, as values of a map.
//
// Written once for the host and the device; loops and memory are in kernels/nf4.h.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/arithmetic.h>
#include <pacer/kernels/math/fp8.h>

namespace pacer::kernels {

constexpr int64_t kNf4Block = 64;         // neighbouring elements that share a scale
constexpr int64_t kNf4NestedBlock = 256;  // neighbouring scales that share one, with double quantisation

// What the codes 0 ... 15 mean, as a part of absmax.
constexpr float kNf4Book[16] = {-1.0f,         -0.696192801f, -0.525073051f,  -0.394917488f,
                                -0.284441382f, -0.18477343f,  -0.0910500363f, 0.0f,
                                0.0795802996f, 0.160930201f,  0.246112302f,   0.337915242f,
                                0.440709829f,  0.562617004f,  0.722956836f,   1.0f};
constexpr uint32_t kNf4Zero = 7;  // the code of 0

// Half-way between neighbours of the book, in the decimals and so to the bit that bitsandbytes' GPU code has:
// four of them (0, 8, 12, 14) are not the float that the mean of two floats would be rounded to, but the one
// beside it, as far away. A code is the number of thresholds strictly below.
constexpr float kNf4Thresholds[15] = {-0.8480964004993439f,   -0.6106329262256622f,  -0.4599952697753906f,
                                      -0.33967943489551544f,  -0.23460740596055984f, -0.13791173323988914f,
                                      -0.045525018125772476f, 0.03979014977812767f,  0.1202552504837513f,
                                      0.2035212516784668f,    0.2920137718319893f,   0.3893125355243683f,
                                      0.5016634166240692f,    0.6427869200706482f,   0.8614784181118011f};

// What elements are multiplied with before they are compared: 1 / absmax, but finite, so that a zero stays
// one in a block of zeros (whose codes are all 7) and where absmax is so small that 1 / absmax is infinite.
PACER_HOST_DEVICE float nf4_inverse(float absmax) {
  const float inverse = div_(1.0f, absmax);
  return inverse < 0x1.fffffep127f ? inverse : 0x1.fffffep127f;
}

// The code of x * nf4_inverse(absmax), by halving: of the thresholds that are left the middle one is chosen
// by what was decided before, without a branch, so that loops over it vectorise.
inline __attribute__((always_inline)) uint32_t nf4_encode(float scaled) {
  const float* const t = kNf4Thresholds;
  const bool eight = scaled > t[7];
  const bool four = scaled > (eight ? t[11] : t[3]);
  const float lower_two = eight ? t[9] : t[1], upper_two = eight ? t[13] : t[5];
  const bool two = scaled > (four ? upper_two : lower_two);
  const float first = eight ? t[8] : t[0], second = eight ? t[10] : t[2];
  const float third = eight ? t[12] : t[4], fourth = eight ? t[14] : t[6];
  const float lower_one = four ? third : first, upper_one = four ? fourth : second;
  const bool one = scaled > (two ? upper_one : lower_one);
  return (eight ? 8u : 0u) + (four ? 4u : 0u) + (two ? 2u : 0u) + (one ? 1u : 0u);
}

// The same code in another way, for a GPU, whose lanes keep a table of 32 entries: [-1, 1] is cut into
// buckets in which there is one threshold at most. The bucket never decreases as `scaled` grows, so that
// thresholds of lower buckets are below and those of higher ones are not, however the bucket is rounded.
//   code = buckets.below[bucket] + (scaled > buckets.threshold[bucket]),  bucket = nf4_bucket(scaled) % 32
// For |scaled| <= 1 and a few units in the last place.
constexpr int kNf4Buckets = 32;
constexpr float kNf4BucketsOfOne = 15.4f;  // from 0 to 1
PACER_HOST_DEVICE uint32_t nf4_bucket(float scaled) {
  // Adding 2^23 rounds to an integer, which then is the mantissa's last bits.
  return bits_of(fma_(scaled, kNf4BucketsOfOne, 0x1p23f + 16.0f));
}
struct Nf4Buckets {
  float threshold[kNf4Buckets];  // 2 where there is none
  uint32_t below[kNf4Buckets];   // number of thresholds in lower buckets
};
constexpr Nf4Buckets nf4_buckets() {
  Nf4Buckets buckets{};
  for (int b = 0; b < kNf4Buckets; ++b) {
    buckets.threshold[b] = 2.0f;
    for (const float threshold : kNf4Thresholds) {
      // No threshold is near the edge of a bucket, so that the compiler's arithmetic finds its bucket, too.
      const int bucket = static_cast<int>(static_cast<double>(threshold) * kNf4BucketsOfOne + 16.5);
      if (bucket == b) buckets.threshold[b] = threshold;
      if (bucket < b) ++buckets.below[b];
    }
  }
  return buckets;
}

// The scale of a block with double quantisation; rounded after each operation.
PACER_HOST_DEVICE float nf4_nested_decode(float map_value, float nested_absmax, float offset) {
  return mul_(map_value, nested_absmax) + offset;
}

// The border between values `i` and `i + 1` of the map, which grow.
constexpr int kNf4NestedBorders = 255;
PACER_HOST_DEVICE float nf4_nested_border(const float* map, int i) { return mul_(map[i] + map[i + 1], 0.5f); }

// The code of (absmax - offset) * nf4_inverse(nested_absmax): the nearest value of the map, the lower one of
// two that are as near, which is the number of borders strictly below.
PACER_HOST_DEVICE uint32_t nf4_nested_encode(const float* borders, float scaled) {
  uint32_t code = 0;
  for (int bit = 7; bit >= 0; --bit) {
    const uint32_t step = 1u << bit;
    code += scaled > borders[code + step - 1] ? step : 0u;
  }
  return code;
}
constexpr uint32_t kNf4NestedZero = 127;  // the code of 0

// The mean of all scales is made in two steps (kernels/nf4.h has their order): a nested block's part from the
// sum of its scales, and the whole from the sum of all parts.
PACER_HOST_DEVICE float nf4_mean_of_block(double sum) {
  return static_cast<float>(mul_(sum, 1.0 / kNf4NestedBlock));
}
PACER_HOST_DEVICE float nf4_offset(double sum_of_parts, int64_t scales) {
  return scales == 0 ? 0.0f
                     : static_cast<float>(div_(mul_(sum_of_parts, static_cast<double>(kNf4NestedBlock)),
                                               static_cast<double>(scales)));
}

}  // namespace pacer::kernels
