// bf16 and fp16 restated with the arithmetic of double and nothing from the bits of a float: a 16-bit number
// is decoded from its fields, and rounding is rounding to a multiple of the spacing of its binade.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "support/samples.h"

namespace pacer::testing {

struct HalfFormat {
  int mantissa_bits;
  int max_exponent;  // of finite values: largest is (2 - 2^-mantissa_bits) * 2^max_exponent
};
constexpr HalfFormat kBFloat16Format{7, 127};
constexpr HalfFormat kFloat16Format{10, 15};

inline double decode_half(uint16_t bits, HalfFormat format) {
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int biased_exponent = (bits & 0x7FFF) >> format.mantissa_bits;
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (biased_exponent == 2 * format.max_exponent + 1) {
    return sign * (mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                                 : std::numeric_limits<double>::infinity());
  }
  const int hidden = biased_exponent == 0 ? 0 : 1 << format.mantissa_bits;
  const int exponent = std::max(biased_exponent, 1) - format.max_exponent - format.mantissa_bits;
  return sign * std::ldexp(mantissa + hidden, exponent);
}

// Distance between neighbouring values at the magnitude of `value`, as if the exponent had no upper end.
inline double half_spacing(double value, HalfFormat format) {
  int exponent = 1 - format.max_exponent;
  if (value != 0) exponent = std::max(exponent, std::ilogb(value));
  return std::ldexp(1.0, exponent - format.mantissa_bits);
}

enum class Ties { to_even, away };

// The nearest value of the format, infinity beyond the largest; `value` is finite.
inline double nearest_half(double value, HalfFormat format, Ties ties) {
  const double spacing = half_spacing(value, format);
  const double multiple = value / spacing;  // exact: the spacing is a power of two
  const double rounded = (ties == Ties::to_even ? std::nearbyint(multiple) : std::round(multiple)) * spacing;
  const double end = std::ldexp(1.0, format.max_exponent + 1);
  return std::abs(rounded) < end ? rounded : std::copysign(std::numeric_limits<double>::infinity(), value);
}

// Equal including the sign of zero; NaNs are equal to each other.
inline bool same_number(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

// Calls check(float) for floats on, beside and between all boundaries of
// rounding to `kept` leading bits: for every pattern of the kept bits, low bits
// that are zero, one, just below, on and above a half, all ones, and random.
template <class Check>
void for_floats_around_every_boundary(int kept, const Check& check) {
  const int dropped = 32 - kept;
  const uint32_t half = uint32_t{1} << (dropped - 1), ones = 2 * half - 1;
  Samples samples(1);
  for (uint64_t high = 0; high < uint64_t{1} << kept; ++high) {
    const uint32_t random = static_cast<uint32_t>(samples.bits()) & ones;
    for (const uint32_t low : {uint32_t{0}, uint32_t{1}, half - 1, half, half + 1, ones, random}) {
      const uint32_t bits = static_cast<uint32_t>(high << dropped) | low;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      check(value);
    }
  }
}

}  // namespace pacer::testing
