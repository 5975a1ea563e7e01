// Roots and quotients without the branches that LibTorch's and CUDA's have for operands that are very small, very large or no
// numbers: half the instructions, and the elements of a thread go side by side. Whoever uses them asks afterwards
// whether all operands were ordinary, and works with AnyOperands where they were not. Results for ordinary operands are
// those of AnyOperands to the bit: the steps are those of CUDA's own division and root where these take their short way.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/arithmetic.h>

namespace pacer::kernels {

// Of one thread. Operands of roots: 0 and [2^-100, 2^30]. Quotients: dividends 0 and [2^-80, 2^15] in magnitude, divisors
// [2^-60, 2^30].
class OrdinaryOperands {
 public:
  __device__ __forceinline__ float root(float a) {
    least_square_ = min(least_square_, bits_of(a) - 1);  // of zero: the largest integer
    largest_square_ = max(largest_square_, bits_of(a));  // NaN, and what is below zero, lie above all numbers
    float inverse;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(a));
    inverse = fminf(inverse, 0x1p64f);  // so that the root of zero is zero
    const float root = mul_(a, inverse);
    return fma_(fma_(-root, root, a), mul_(0.5f, inverse), root);
  }

  __device__ __forceinline__ float quotient(float a, float b) {
    const uint32_t magnitude = bits_of(a) & 0x7FFFFFFFu;
    least_dividend_ = min(least_dividend_, magnitude - 1);
    largest_dividend_ = max(largest_dividend_, magnitude);
    least_divisor_ = min(least_divisor_, bits_of(b));
    largest_divisor_ = max(largest_divisor_, bits_of(b));
    const float inverse = reciprocal_of_normal(b);
    float quotient = mul_(a, inverse);
    // Twice, as the first may be off by more than the last digit. This form keeps the sign of zero.
    quotient = fma_(fma_(b, quotient, -a), -inverse, quotient);
    return fma_(fma_(b, quotient, -a), -inverse, quotient);
  }

  // Whether all operands so far were ordinary.
  __device__ __forceinline__ bool all_were() const {
    return largest_square_ <= bits_of(0x1p30f) && least_square_ >= bits_of(0x1p-100f) - 1 &&
           largest_dividend_ <= bits_of(0x1p15f) && least_dividend_ >= bits_of(0x1p-80f) - 1 &&
           largest_divisor_ <= bits_of(0x1p30f) && least_divisor_ >= bits_of(0x1p-60f);
  }

  // The largest operand of a root, and the largest magnitude of a dividend, as bits.
  __device__ __forceinline__ uint32_t largest_square() const { return largest_square_; }
  __device__ __forceinline__ uint32_t largest_dividend() const { return largest_dividend_; }

 private:
  uint32_t least_square_ = ~0u, largest_square_ = 0;
  uint32_t least_dividend_ = ~0u, largest_dividend_ = 0;
  uint32_t least_divisor_ = ~0u, largest_divisor_ = 0;
};

}  // namespace pacer::kernels
