// Weights in 24 bits restated in double: a bf16 and a correction in 127ths of half the way to the next bf16 number. It
// takes nothing from the bits of a float but the order of the 16-bit numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "support/kernels/half_reference.h"

namespace pacer::testing {

// Half the distance of the finite number `rounded` to its neighbour away from zero or towards it; of a zero, to the
// smallest number of either sign. Beyond the largest number 2^128 follows.
inline double half_to_neighbour(uint16_t rounded, bool outward) {
  const auto magnitude = static_cast<uint16_t>(rounded & 0x7FFF);
  if (magnitude == 0) return std::ldexp(1.0, -134);
  const auto value_of = [](int bits) {
    return bits == 0x7F80 ? std::ldexp(1.0, 128) : decode_half(static_cast<uint16_t>(bits), kBFloat16Format);
  };
  return std::abs(value_of(magnitude + (outward ? 1 : -1)) - value_of(magnitude)) / 2;
}

// 2^128 in the place of infinity.
inline double finite_of(uint16_t rounded) {
  const double value = decode_half(rounded, kBFloat16Format);
  return std::isinf(value) ? std::copysign(std::ldexp(1.0, 128), value) : value;
}

// What a correction that an encoder can have made stands for, before it is rounded to fp32.
inline double corrected(uint16_t rounded, int correction) {
  if (correction == 0) return finite_of(rounded);
  const bool outward = (correction < 0) == (decode_half(rounded, kBFloat16Format) < 0);
  return finite_of(rounded) + correction * half_to_neighbour(rounded, outward) / 127;
}

// The correction of a finite value whose nearest bf16 number, ties to even, has these bits.
inline int correction_of(double value, uint16_t rounded) {
  const double apart = value - finite_of(rounded);
  const bool outward = (apart < 0) == (decode_half(rounded, kBFloat16Format) < 0);
  const double steps = std::round(127 * apart / half_to_neighbour(rounded, outward));
  const double largest = rounded % 2 == 0 ? 127 : 126;
  return static_cast<int>(std::clamp(steps, -largest, largest));
}

}  // namespace pacer::testing
