// The arithmetic every kernel is written in: each operation rounds exactly once, to nearest even, on the host
// and on the device alike. Expressions are never left to the compiler to contract: where a fused multiply-add
// is meant, fma_ says so, and both compilers are told not to fuse anything else (-ffp-contract=off,
// --fmad=false).
#pragma once

#include <cstdint>
#include <cstring>

#include <pacer/core/host_device.h>

namespace pacer::kernels {

// a * b + c, rounded once.
PACER_HOST_DEVICE float fma_(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}
PACER_HOST_DEVICE double fma_(double a, double b, double c) {
#if defined(__CUDA_ARCH__)
  return __fma_rn(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

PACER_HOST_DEVICE float mul_(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
PACER_HOST_DEVICE double mul_(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

PACER_HOST_DEVICE float div_(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
PACER_HOST_DEVICE double div_(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __ddiv_rn(a, b);
#else
  return a / b;
#endif
}

PACER_HOST_DEVICE float sqrt_(float a) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(a);
#else
  return __builtin_sqrtf(a);
#endif
}
PACER_HOST_DEVICE double sqrt_(double a) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(a);
#else
  return __builtin_sqrt(a);
#endif
}

// The same results as sqrt_ and div_. On the device these take a slow path for a zero operand, and zero
// moments are common (rows of an embedding that no batch has used): there, zero is replaced before and put
// back after.
PACER_HOST_DEVICE float sqrt_of_often_zero(float a) {
#if defined(__CUDA_ARCH__)
  const float root = sqrt_(a == 0.0f ? 1.0f : a);
  return a == 0.0f ? a : root;
#else
  return sqrt_(a);
#endif
}
PACER_HOST_DEVICE double sqrt_of_often_zero(double a) { return sqrt_(a); }

PACER_HOST_DEVICE float div_often_zero(float a, float b) {
#if defined(__CUDA_ARCH__)
  const bool zero = a == 0.0f && b > 0.0f;
  const float quotient = div_(zero ? 1.0f : a, b);
  return zero ? a : quotient;
#else
  return div_(a, b);
#endif
}
PACER_HOST_DEVICE double div_often_zero(double a, double b) { return div_(a, b); }

// Both, as what a function is given that may be called with other means for operands that are known better, such as
// cuda/ordinary_operands.cuh.
struct AnyOperands {
  template <class Real>
  PACER_HOST_DEVICE Real root(Real a) const {
    return sqrt_of_often_zero(a);
  }
  template <class Real>
  PACER_HOST_DEVICE Real quotient(Real a, Real b) const {
    return div_often_zero(a, b);
  }
};

// 1 / a rounded to nearest even, where both are normal numbers. On the device these are the steps of its own division for
// such numbers, without those for others, which cost as much again; what it makes of others is another number
// than on the host.
PACER_HOST_DEVICE float reciprocal_of_normal(float a) {
#if defined(__CUDA_ARCH__)
  float quotient;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(a));
  return fma_(fma_(-a, quotient, 1.0f), quotient, quotient);
#else
  return 1.0f / a;
#endif
}

// Adding it to a number below 2^22 rounds that to an integer, which then is in the low bits.
constexpr float kShiftToInteger = 0x1.8p23f;

// The larger and the smaller of a and the number b; b where a is NaN.
PACER_HOST_DEVICE float larger(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fmaxf(a, b);
#else
  return a > b ? a : b;
#endif
}
PACER_HOST_DEVICE float smaller(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fminf(a, b);
#else
  return a < b ? a : b;
#endif
}

// The smaller of 1 and a number that is not below 0.
PACER_HOST_DEVICE float at_most_1(float a) {
#if defined(__CUDA_ARCH__)
  return __saturatef(a);
#else
  return smaller(a, 1.0f);
#endif
}

// 1 - base^exponent for base in [0, 1) and exponent >= 0, by binary powering with the rounding errors carried
// along (two doubles a factor): accurate to a few units of 2^-53 of the result even where base^exponent is
// close to 1, and the same bits on host and device, which `pow` does not promise.
PACER_HOST_DEVICE double one_minus_power(double base, int64_t exponent) {
  double high = 1.0, low = 0.0;            // high + low: the product so far
  double factor = base, factor_low = 0.0;  // factor + factor_low: base^(2^i)
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) {
      const double product = mul_(high, factor);
      const double error = fma_(low, factor, fma_(high, factor_low, fma_(high, factor, -product)));
      high = product + error;
      low = error - (high - product);
    }
    const double square = mul_(factor, factor);
    const double error = fma_(2.0 * factor, factor_low, fma_(factor, factor, -square));
    factor = square + error;
    factor_low = error - (factor - square);
  }
  const double difference = 1.0 - high;
  return difference + (((1.0 - difference) - high) - low);
}

PACER_HOST_DEVICE uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

PACER_HOST_DEVICE float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

}  // namespace pacer::kernels
