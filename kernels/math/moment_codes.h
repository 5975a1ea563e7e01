// Moments in 8 bits: how a group of 32 elements that follow one another in memory becomes codes and a scale, and back
// (FlashOptim, arXiv:2602.23349). This file is the whole of the format; the loops that step over groups are
// cpu/coded_loop.h and cuda/coded_loop.cuh. All of it is a pure function, written once for host and device.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/arithmetic.h>
#include <pacer/kernels/math/half_types.h>

namespace pacer::kernels {

// The magnitude of a float as an integer that orders as magnitudes do: infinities lie above all numbers, and NaN above
// infinities. So the largest of a group does not depend on the order in which it is looked for.
PACER_HOST_DEVICE uint32_t ordered_magnitude(float value) { return bits_of(value) & 0x7FFFFFFFu; }

PACER_HOST_DEVICE float magnitude(float value) {
#if defined(__CUDA_ARCH__)
  return fabsf(value);
#else
  return float_of(ordered_magnitude(value));
#endif
}

// A number from 0 to 255 as the last bits of a float between 2^23 and 2^24, whose steps are 1: conversions are slow on a GPU.
PACER_HOST_DEVICE float above_2_23(uint8_t number) { return float_of(0x4B000000u | number); }

// Codes and scales of both moments, 2.125 bytes an element. The first moment x becomes y = x / scale, z = 2 y / (1 + |y|),
// and the code round(127 z): steps are finest near zero. The second moment becomes s = sqrt(v) and the code
// round(255 s / scale), but at least 1 where s is not 0: a step divides by s, and a zero in its place would make it
// enormous. Ties go to even. The scale is the largest |x|, or s, of the group.
struct EightBitMoments {
  static constexpr int kGroup = 32;
  using FirstCode = int8_t;
  using SecondCode = uint8_t;

  // A scale as it is stored, of the ordered_magnitude of what it is for.
  // - It is rounded to nearest even; the group's largest element has the last code all the same.
  // - fp16 below 2^-14 is coarse. There it is rounded up, so that codes reach what is largest.
  // - Below 2^-32, a 256th of the smallest scale, all of a group is zero: a moment that decays ends there.
  // - From 65504 on it is that number, the largest of fp16, and what is larger has the last code.
  // - A group with a NaN or an infinity has a scale of NaN, and is NaN as a whole when it is read.
  PACER_HOST_DEVICE static Float16 stored_scale(uint32_t largest) {
    const uint32_t finite = largest >= bits_of(65504.0f) ? 0x7BFFu : ordinary_scale(float_of(largest)).bits;
    return {static_cast<uint16_t>(largest >= 0x7F800000u ? 0x7E00u : finite)};
  }
  // The same for a number below 65504.
  PACER_HOST_DEVICE static Float16 ordinary_scale(float value) {
    const Float16 nearest = to_float16(value);
    const bool up = value < 0x1p-14f && to_float(nearest) < value;
    const auto bits = static_cast<uint16_t>(nearest.bits + (up ? 1 : 0));
    return {value < 0x1p-32f ? uint16_t{0} : bits};
  }

  // The first moments of a group.
  struct First {
    float scale;
    float limit;  // the scale, or 0 where there is none
    float base;   // the scale, or 1 where there is none
    PACER_HOST_DEVICE explicit First(Float16 stored)
        : scale(to_float(stored)), limit(scale > 0.0f ? scale : 0.0f), base(scale > 0.0f ? scale : 1.0f) {}

    // What the scale of a group is made of is the largest of this.
    PACER_HOST_DEVICE static uint32_t measure(float x) { return ordered_magnitude(x); }
    PACER_HOST_DEVICE static Float16 scale_of(uint32_t largest) { return stored_scale(largest); }
    // y = z / (2 - |z|) with z = code / 127.
    PACER_HOST_DEVICE float decode(int8_t code) const {
      return decode_shifted(above_2_23(static_cast<uint8_t>(code ^ 0x80)));
    }
    // The same, given 2^23 + 128 + code.
    PACER_HOST_DEVICE float decode_shifted(float shifted) const {
      const float number = shifted - (0x1p23f + 128.0f);
      return mul_(mul_(number, reciprocal_of_normal(254.0f - magnitude(number))), scale);
    }
    // 127 z = 254 x / (scale + |x|).
    PACER_HOST_DEVICE int8_t encode(float x) const {
      return encode_ordinary(smaller(larger(x, -limit), limit));
    }
    // The same where the largest of the group is below 65504: what the rounding of the scale leaves above it has the last
    // code without a limit.
    PACER_HOST_DEVICE int8_t encode_ordinary(float x) const {
      const float part = mul_(x, reciprocal_of_normal(base + magnitude(x)));
      return static_cast<int8_t>(bits_of(fma_(254.0f, part, kShiftToInteger)));
    }
  };

  // The second moments of a group.
  struct Second {
    float scale;
    float step;        // between the roots of neighbouring codes
    float limit;       // the scale, or 0 where there is none
    float codes_each;  // of a root of 1
    float least_each;  // makes of a root that is not 0 at least 1, its least code; 0 where there is no scale
    PACER_HOST_DEVICE explicit Second(Float16 stored)
        : scale(to_float(stored)),
          step(mul_(scale, 0x1.010102p-8f)),  // a 255th, rounded up
          limit(scale > 0.0f ? scale : 0.0f),
          codes_each(scale > 0.0f ? mul_(255.0f, reciprocal_of_normal(limit)) : 0.0f),
          least_each(scale > 0.0f ? 0x1p80f : 0.0f) {}

    // The same as of First, as the largest root is the root of the largest. What is below zero, which no step leaves, lies
    // above all, because its root is NaN.
    PACER_HOST_DEVICE static uint32_t measure(float v) { return bits_of(v + 0.0f); }
    PACER_HOST_DEVICE static Float16 scale_of(uint32_t largest) {
      return stored_scale(ordered_magnitude(sqrt_of_often_zero(float_of(largest))));
    }
    // The last code is the scale itself.
    PACER_HOST_DEVICE float decode(uint8_t code) const { return decode_shifted(above_2_23(code)); }
    // The same, given 2^23 + code.
    PACER_HOST_DEVICE float decode_shifted(float shifted) const {
      const float root = smaller(mul_(shifted - 0x1p23f, step), scale);  // NaN where that is the scale
      return mul_(root, root);
    }
    PACER_HOST_DEVICE uint8_t encode(float v) const {
      return encode_ordinary_root(smaller(sqrt_of_often_zero(v), limit));
    }
    // The same, given the root of v, where the largest root of the group is below 65504.
    PACER_HOST_DEVICE uint8_t encode_ordinary_root(float s) const {
      const float code = fma_(s, codes_each, kShiftToInteger);
      const float least = at_most_1(mul_(s, least_each));
      return static_cast<uint8_t>(bits_of(larger(code, kShiftToInteger + least)));
    }
  };
};

}  // namespace pacer::kernels
