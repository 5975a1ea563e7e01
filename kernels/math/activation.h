// Activation functions and their derivatives in fp32, written once for the host and the device: GELU by its
// tanh approximation (Hendrycks and Gimpel, arXiv:1606.08415) and SiLU. Both are x / (1 + 2^w), where w is a
// polynomial of x, so that one power of two and one reciprocal make function and derivative.
//
// Errors beside the exact formulas, in units of 2^-23 of the result, w as above and |w| < 126:
//   gelu           4 + 2 |w| / 3     w = -2 sqrt(2 / pi) log2(e) (x + 0.044715 x^3)
//   silu           3                 w = -log2(e) x
//   derivatives    6 + 2 |w| / 3 and 4, of the sum of the magnitudes of their two terms
// Beyond, where 2^w would overflow, results are 0, which is an error of less than 1e-35. gelu(-inf) = -0,
// gelu(inf) = inf, the derivatives there are 0 and 1, and NaN stays NaN. Everything is branch-free, so that
// loops over it vectorise.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/arithmetic.h>

namespace pacer::kernels {
namespace detail {

// NaN stays NaN.
PACER_HOST_DEVICE float at_least(float value, float bound) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(value), "f"(bound));
  return larger;
#else
  return value < bound ? bound : value;
#endif
}
PACER_HOST_DEVICE float at_most(float value, float bound) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(value), "f"(bound));
  return smaller;
#else
  return value > bound ? bound : value;
#endif
}

// 2^(n + fraction) for shifted = n + kShiftToInteger, -126 <= n <= 127, and a fraction of at most 1/2 both
// ways, or NaN. Off by 2^-22.5 of it at most, and exact where the fraction is 0.
PACER_HOST_DEVICE float power_of_two(float shifted, float fraction) {
  float power = fma_(0x1.5bba14p-10f, fraction, 0x1.3cea88p-7f);
  power = fma_(power, fraction, 0x1.c6b752p-5f);
  power = fma_(power, fraction, 0x1.ebf9bcp-3f);
  power = fma_(power, fraction, 0x1.62e42ap-1f);
  power = fma_(power, fraction, 1.0f);
  return float_of(bits_of(power) + (bits_of(shifted) << 23));
}

// 1 / value for 1 <= value < 2^127, rounded to nearest even; 0 where that were less than 2^-126, and NaN of NaN.
PACER_HOST_DEVICE float reciprocal(float value) {
#if defined(__CUDA_ARCH__)
  return reciprocal_of_normal(value);
#else
  return value > 0x1p126f ? 0.0f : reciprocal_of_normal(value);
#endif
}

}  // namespace detail

// What an activation and its derivative have in common. Only below the largest w, x is not what was given.
struct ActivationTerms {
  float x;         // not below the number where the activation is 0
  float bounded;   // x, and not above one where 1 + 2^w is 1
  float power;     // 2^w
  float quotient;  // 1 / (1 + 2^w)
};

PACER_HOST_DEVICE ActivationTerms gelu_terms(float u) {
  constexpr float kLinear = -0x1.26aec2p1f, kCubic = -0x1.a5a7dp-4f;  // of w
  const float x = detail::at_least(u, -10.02f), bounded = detail::at_most(x, 8.0f);
  const float factor = fma_(mul_(bounded, bounded), kCubic, kLinear);
  const float shifted = fma_(bounded, factor, kShiftToInteger);
  const float fraction = fma_(bounded, factor, -(shifted - kShiftToInteger));
  const float power = detail::power_of_two(shifted, fraction);
  return {x, bounded, power, detail::reciprocal(1.0f + power)};
}
PACER_HOST_DEVICE float gelu(const ActivationTerms& terms) { return mul_(terms.x, terms.quotient); }
PACER_HOST_DEVICE float gelu_derivative(const ActivationTerms& terms) {
  constexpr float kConstant = 0x1.988454p0f, kSquare = 0x1.b6676cp-3f;  // of -w' / log2(e)
  const float slope = mul_(terms.bounded, fma_(mul_(terms.bounded, terms.bounded), kSquare, kConstant));
  return fma_(mul_(slope, mul_(terms.power, terms.quotient)), terms.quotient, terms.quotient);
}
PACER_HOST_DEVICE float gelu(float u) { return gelu(gelu_terms(u)); }
PACER_HOST_DEVICE float gelu_derivative(float u) { return gelu_derivative(gelu_terms(u)); }

PACER_HOST_DEVICE ActivationTerms silu_terms(float u) {
  constexpr float kHigh = -0x1.715476p0f, kLow = -0x1.4ae0cp-26f;  // log2(e), negative, in two parts
  const float x = detail::at_least(u, -87.7f), bounded = detail::at_most(x, 60.0f);
  const float shifted = fma_(bounded, kHigh, kShiftToInteger);
  const float rest = fma_(bounded, kHigh, -(shifted - kShiftToInteger));
  const float power = detail::power_of_two(shifted, fma_(bounded, kLow, rest));
  return {x, bounded, power, detail::reciprocal(1.0f + power)};
}
PACER_HOST_DEVICE float silu(const ActivationTerms& terms) { return mul_(terms.x, terms.quotient); }
PACER_HOST_DEVICE float silu_derivative(const ActivationTerms& terms) {
  const float slope = mul_(terms.bounded, mul_(terms.power, terms.quotient));
  return fma_(slope, terms.quotient, terms.quotient);
}
PACER_HOST_DEVICE float silu(float u) { return silu(silu_terms(u)); }
PACER_HOST_DEVICE float silu_derivative(float u) { return silu_derivative(silu_terms(u)); }

}  // namespace pacer::kernels
