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

PACER_HOST_DEVICE float magnitude(float value) { return float_of(ordered_magnitude(value)); }

// The nearest integer of a * b, ties to even, for magnitudes below 2^22.
PACER_HOST_DEVICE int32_t rounded_product(float a, float b) {
  return static_cast<int32_t>(bits_of(fma_(a, b, 0x1.8p23f)) - 0x4B400000u);
}

// Codes and scales of both moments, 2.125 bytes an element. The first moment x becomes y = x / scale, z = 2 y / (1 + |y|),
// and the code round(127 z): steps are finest near zero. The second moment becomes s = sqrt(v) and the code
// round(255 s / scale), but at least 1 where s is not 0: a step divides by s, and a zero in its place would make it
// enormous. Ties go to even. The scale is the largest |x|, or s, of the group.
struct EightBitMoments {
  static constexpr int kGroup = 32;
  using FirstCode = int8_t;
  using SecondCode = uint8_t;

  // The scale as it is stored, of the group's largest ordered_magnitude.
  // - It is rounded to nearest even; the group's largest element has the last code all the same.
  // - fp16 below 2^-14 is coarse. There it is rounded up, so that codes reach what is largest.
  // - Below 2^-32, a 256th of the smallest scale, all of a group is zero: a moment that decays ends there.
  // - From 65504 on it is that number, the largest of fp16, and what is larger has the last code.
  // - A group with a NaN or an infinity has a scale of NaN, and is NaN as a whole when it is read.
  PACER_HOST_DEVICE static Float16 scale(uint32_t largest) {
    const float value = float_of(largest);
    const Float16 nearest = to_float16(value);
    const bool up = value < 0x1p-14f && to_float(nearest) < value;
    const auto bits = static_cast<uint16_t>(nearest.bits + (up ? 1 : 0));
    const auto finite = static_cast<uint16_t>(value >= 65504.0f ? 0x7BFFu : bits);
    const auto or_zero = static_cast<uint16_t>(value < 0x1p-32f ? 0u : finite);
    return {static_cast<uint16_t>(largest >= 0x7F800000u ? 0x7E00u : or_zero)};
  }

  // The first moments of a group.
  struct First {
    float scale;
    float base;    // the scale, or 1 where there is none
    int32_t most;  // the last code, 0 without a scale
    PACER_HOST_DEVICE explicit First(Float16 stored)
        : scale(to_float(stored)), base(scale > 0.0f ? scale : 1.0f), most(scale > 0.0f ? 127 : 0) {}

    // What scale() takes the largest of.
    PACER_HOST_DEVICE static uint32_t measure(float x) { return ordered_magnitude(x); }
    // y = z / (2 - |z|) with z = code / 127.
    PACER_HOST_DEVICE float decode(int8_t code) const {
      const auto number = static_cast<float>(code);
      return mul_(div_often_zero(number, 254.0f - magnitude(number)), scale);
    }
    // 127 z = 254 x / (scale + |x|).
    PACER_HOST_DEVICE int8_t encode(float x) const {
      const int32_t code = rounded_product(254.0f, div_often_zero(x, base + magnitude(x)));
      const int32_t low = code < -most ? -most : code;
      return static_cast<int8_t>(low > most ? most : low);
    }
  };

  // The second moments of a group.
  struct Second {
    float scale;
    float step;        // between the roots of neighbouring codes
    float limit;       // the scale, or 0 where there is none
    float codes_each;  // of a root of 1
    PACER_HOST_DEVICE explicit Second(Float16 stored)
        : scale(to_float(stored)),
          step(div_often_zero(scale, 255.0f)),
          limit(scale > 0.0f ? scale : 0.0f),
          codes_each(scale > 0.0f ? div_(255.0f, limit) : 0.0f) {}

    PACER_HOST_DEVICE static uint32_t measure(float v) { return ordered_magnitude(sqrt_of_often_zero(v)); }
    // The last code is the scale itself.
    PACER_HOST_DEVICE float decode(uint8_t code) const {
      const float s = mul_(static_cast<float>(code), step);
      const float root = s < scale ? s : scale;
      return mul_(root, root);
    }
    PACER_HOST_DEVICE uint8_t encode(float v) const {
      const float s = sqrt_of_often_zero(v);
      const int32_t code = rounded_product(s < limit ? s : limit, codes_each);
      const int32_t least = s > 0.0f && limit > 0.0f ? 1 : 0;
      return static_cast<uint8_t>(code < least ? least : code);
    }
  };
};

}  // namespace pacer::kernels
