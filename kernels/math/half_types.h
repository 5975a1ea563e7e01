// bf16 and fp16 values as they lie in memory, and their conversions from and to float. Rounding is to nearest
// even unless the name says otherwise; every NaN becomes a quiet NaN. The host versions are branch-free
// integer code, so that loops over them vectorise; the device versions use the hardware's conversions, which
// give the same bits.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/arithmetic.h>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace pacer::kernels {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

constexpr uint16_t kBFloat16NaN = 0x7FC0;

PACER_HOST_DEVICE bool is_nan_bits(uint32_t float_bits) { return (float_bits & 0x7FFFFFFFu) > 0x7F800000u; }

PACER_HOST_DEVICE float to_float(BFloat16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }

PACER_HOST_DEVICE BFloat16 to_bfloat16(float value) {
#if defined(__CUDA_ARCH__)
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
#else
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(is_nan_bits(bits) ? kBFloat16NaN : rounded)};
#endif
}

// Stochastic rounding: rounds up in magnitude with probability (discarded bits) / 2^16, decided by 16
// uniformly random bits. Unbiased; infinities stay, NaN stays NaN.
PACER_HOST_DEVICE BFloat16 to_bfloat16_stochastic(float value, uint32_t random16) {
  const uint32_t bits = bits_of(value);
  return {static_cast<uint16_t>(is_nan_bits(bits) ? kBFloat16NaN : (bits + random16) >> 16)};
}

// A float as a bf16 (rounded half away from zero) and the 16 low bits: together they rebuild the float
// exactly. NaN is stored as 0x7FC0 with remainder 0.
struct BFloat16AndRemainder {
  BFloat16 rounded;
  uint16_t remainder;
};

PACER_HOST_DEVICE BFloat16AndRemainder split(float value) {
  const uint32_t bits = bits_of(value);
  const bool nan = is_nan_bits(bits);
  const uint32_t rounded = (bits + 0x8000u) >> 16;
  return {{static_cast<uint16_t>(nan ? kBFloat16NaN : rounded)},
          static_cast<uint16_t>(nan ? 0u : bits & 0xFFFFu)};
}

// The inverse of split: the remainder, read as a signed number, is added below the bf16's own bits. split
// never leaves a zero with a negative remainder. Where one is found, somebody else has written that zero, and
// zero it is: without this the difference would be the bits of a NaN.
PACER_HOST_DEVICE float join(BFloat16 rounded, uint16_t remainder) {
  const uint32_t high = static_cast<uint32_t>(rounded.bits) << 16;
  const uint32_t low = static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(remainder)));
  const bool was_written = (rounded.bits & 0x7FFFu) == 0 && (remainder & 0x8000u) != 0;
  return float_of(was_written ? high : high + low);
}

PACER_HOST_DEVICE float to_float(Float16 value) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(value.bits));
#else
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7FFFu) << 13;
  // Exponent rebias by a power of two: exact, and it turns fp16 subnormals into normal floats.
  const float scaled = mul_(float_of(magnitude), 0x1p112f);
  const bool special = magnitude >= 0x0F800000u;  // infinity or NaN
  const uint32_t quiet = magnitude > 0x0F800000u ? 0x00400000u : 0u;
  return float_of(sign | (special ? 0x7F800000u | magnitude | quiet : bits_of(scaled)));
#endif
}

PACER_HOST_DEVICE Float16 to_float16(float value) {
#if defined(__CUDA_ARCH__)
  return {__half_as_ushort(__float2half_rn(value))};
#else
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Normal results: round the mantissa to 10 bits (nearest even) and rebias; a carry may reach infinity.
  const uint32_t normal = (magnitude + 0xC8000FFFu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 lets the float adder align and round the mantissa at 2^-24.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t result = magnitude >= 0x47800000u ? 0x7C00u : finite;
  return {static_cast<uint16_t>(sign | (is_nan_bits(bits) ? 0x7E00u : result))};
#endif
}

}  // namespace pacer::kernels
