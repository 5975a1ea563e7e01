// Roots and quotients without the branches that CUDA's own have for operands that are very small, very large or no
// numbers: half the instructions, and the elements of a thread go side by side. Whoever uses them asks afterwards
// whether all operands were ordinary, and works with AnyOperands where they were not. Results for ordinary operands are
// those of AnyOperands to the bit: the steps are those of CUDA's own division and root where these take their short way.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/arithmetic.h>

namespace pacer::kernels {

// Those of one thread. Ordinary operands of roots are 0 and [2^-100, 2^30], dividends 0 and [2^-80, 2^15] in magnitude. Divisors,
// which are not looked at, must be within [2^-60, 2^31].
class OrdinaryOperands {
 public:
  __device__ __forceinline__ float root(float a) {
    least_square_ = min(least_square_, bits_of(a) - 1);  // of zero: the largest integer
    largest_square_ = max(largest_square_, bits_of(a));  // NaN, and what is below zero, lie above all numbers
    float inverse;
    // What is added changes no ordinary number but zero, whose root is zero then.
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(a + 0x1p-126f));
    const float root = mul_(a, inverse);
    return fma_(fma_(-root, root, a), mul_(0.5f, inverse), root);
  }

  __device__ __forceinline__ float quotient(float a, float b) {
    least_dividend_ = min(least_dividend_, 2 * bits_of(a) - 1);
    largest_dividend_ = max(largest_dividend_, 2 * bits_of(a));
    const float inverse = reciprocal_of_normal(b);
    float quotient = mul_(a, inverse);
    // Twice, as the first may be off by more than the last digit. This form keeps the sign of zero.
    quotient = fma_(fma_(b, quotient, -a), -inverse, quotient);
    return fma_(fma_(b, quotient, -a), -inverse, quotient);
  }

  // Whether all operands so far were ordinary.
  __device__ __forceinline__ bool all_were() const {
    return largest_square_ <= bits_of(0x1p30f) && least_square_ >= bits_of(0x1p-100f) - 1 &&
           largest_dividend_ <= 2 * bits_of(0x1p15f) && least_dividend_ >= 2 * bits_of(0x1p-80f) - 1;
  }

  // The bits of the largest operand of a root, and of the largest magnitude of a dividend.
  __device__ __forceinline__ uint32_t largest_square() const { return largest_square_; }
  __device__ __forceinline__ uint32_t largest_dividend() const { return largest_dividend_ / 2; }

 private:
  uint32_t least_square_ = ~0u, largest_square_ = 0;
  uint32_t least_dividend_ = ~0u, largest_dividend_ = 0;  // without signs, times two
};

}  // namespace pacer::kernels
