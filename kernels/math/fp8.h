// 8-bit floats and their scales, written once for the host and the device. e4m3 has 3 bits of mantissa, no
// infinity and 448 as its largest number; e5m2 has 2 bits and ends at 57,344 here (Micikevicius et al., "FP8
// Formats for Deep Learning", arXiv:2209.05433). A tensor is cast as x * scale, rounded to nearest even;
// what is larger than the largest number becomes that, infinities too; NaN stays NaN.
//
// The scale follows the largest magnitude ("amax") of a tensor: of the last steps (delayed scaling) or of the
// tensor itself (current scaling). Magnitudes are compared as integers, the bits of |x|, so that the result
// depends on no order, and NaN counts as more than infinity and that as more than any number.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/half_types.h>

#if defined(__CUDACC__)
#include <cuda_fp8.h>
#endif

namespace pacer::kernels {

enum class Fp8Format : uint32_t { e4m3, e5m2 };

PACER_HOST_DEVICE float fp8_largest(Fp8Format format) {
  return format == Fp8Format::e4m3 ? 448.0f : 57344.0f;
}

namespace detail {

// What a format is made of: the bits of its mantissa, the bias of its exponent, and the code of its largest
// number.
template <Fp8Format kFormat>
struct Fp8Traits;
template <>
struct Fp8Traits<Fp8Format::e4m3> {
  static constexpr uint32_t kMantissa = 3, kBias = 7, kLargest = 0x7E;
};
template <>
struct Fp8Traits<Fp8Format::e5m2> {
  static constexpr uint32_t kMantissa = 2, kBias = 15, kLargest = 0x7B;
};

}  // namespace detail

constexpr uint8_t kFp8NaN = 0x7F;

// Branch-free on the host, so that loops over it vectorise.
template <Fp8Format kFormat>
PACER_HOST_DEVICE uint8_t to_fp8(float value) {
#if defined(__CUDA_ARCH__)
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, kFormat == Fp8Format::e4m3 ? __NV_E4M3 : __NV_E5M2);
#else
  using Traits = detail::Fp8Traits<kFormat>;
  constexpr uint32_t kShift = 23 - Traits::kMantissa;
  constexpr uint32_t kSmallestNormal = (127 + 1 - Traits::kBias) << 23;
  // A float whose last bit is worth the smallest subnormal: adding it aligns and rounds the mantissa.
  constexpr uint32_t kAligner = (127 + 24 - Traits::kBias - Traits::kMantissa) << 23;
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7FFFFFFFu;
  const uint32_t rounded = (magnitude + (1u << (kShift - 1)) - 1 + ((magnitude >> kShift) & 1u)) >> kShift;
  const uint32_t normal = rounded - ((127 - Traits::kBias) << Traits::kMantissa);
  const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(kAligner)) - kAligner;
  const uint32_t code = magnitude < kSmallestNormal ? subnormal : normal;
  const uint32_t finite = sign | (code > Traits::kLargest ? Traits::kLargest : code);
  return static_cast<uint8_t>(is_nan_bits(bits) ? kFp8NaN : finite);
#endif
}

// The bits of |value|, the same for every NaN.
PACER_HOST_DEVICE uint32_t magnitude_bits(float value) {
  const uint32_t bits = bits_of(value);
  return is_nan_bits(bits) ? 0x7FC00000u : bits & 0x7FFFFFFFu;
}
PACER_HOST_DEVICE bool is_finite_amax(uint32_t amax) { return amax < 0x7F800000u; }

// How scales follow magnitudes.
struct Fp8Rule {
  uint32_t history = 16;     // steps of delayed scaling, >= 1
  bool newest_only = false;  // the newest of them decides, instead of the largest
  int32_t margin = 1;        // powers of two between the largest magnitude and the largest number
  bool power_of_two = true;  // scales are, so that 1 / scale is exact
};

// The scale by which a tensor of that amax (bits) just fits, at most 2^120, as for zeros. 1 where the amax is
// not finite.
PACER_HOST_DEVICE float fp8_scale(uint32_t amax, Fp8Format format, const Fp8Rule& rule) {
  if (!is_finite_amax(amax)) return 1.0f;
  const uint32_t margin = static_cast<uint32_t>(127 - rule.margin) << 23;  // 2^-margin
  const float scale = mul_(div_(fp8_largest(format), float_of(amax)), float_of(margin));
  const uint32_t bits = bits_of(scale < 0x1p120f ? scale : 0x1p120f);
  return float_of(rule.power_of_two ? bits & 0x7F800000u : bits);
}

// A tensor that is cast in every step, in host or device memory. A fresh one is Fp8Scale{}, with its format.
struct Fp8Scale {
  float scale = 1, inverse = 1;
  uint32_t amax = 0;   // bits, of what was cast since the last update; 0: nothing, or zeros
  uint32_t count = 0;  // how often an amax was recorded
  Fp8Format format = Fp8Format::e4m3;
};

// After a step: records amax in the tensor's `history` (rule.history numbers, in a ring) and sets the scale
// of the next one. An amax of 0 says nothing and one that is not finite must not: neither is recorded.
PACER_HOST_DEVICE void fp8_update(Fp8Scale& tensor, uint32_t* history, const Fp8Rule& rule) {
  const uint32_t amax = tensor.amax;
  tensor.amax = 0;
  if (amax == 0 || !is_finite_amax(amax)) return;
  history[tensor.count++ % rule.history] = amax;
  uint32_t largest = amax;
  const uint32_t recorded = tensor.count < rule.history ? tensor.count : rule.history;
  for (uint32_t i = 0; i < recorded && !rule.newest_only; ++i) {
    largest = history[i] > largest ? history[i] : largest;
  }
  tensor.scale = fp8_scale(largest, tensor.format, rule);
  tensor.inverse = div_(1.0f, tensor.scale);
}

// Where the codes of a tensor go, how they are scaled, and what is noted on the way. A kernel that makes the
// tensor itself takes it, too.
struct Fp8Target {
  Fp8Format format = Fp8Format::e4m3;
  Fp8Rule rule;
  // Delayed scaling: its scale is used once it has a history, and its amax grows to this tensor's where
  // `records` says so. Null: current scaling.
  Fp8Scale* state = nullptr;
  bool records = true;
  // Bits of the tensor's own amax, which decide the scale where no history does. Without codes the tensor is
  // only measured: this grows to its amax, unless `state` has a history, which makes it superfluous.
  uint32_t* measured = nullptr;
  // Zero before; becomes 1 / the scale that was used, what products are multiplied with. NaN for a tensor
  // that has a number that is not finite, so that saturation does not hide it: all products become NaN.
  float* inverse = nullptr;
  uint8_t* codes = nullptr;       // null: only measured
  uint8_t* transposed = nullptr;  // null: not wanted
};

PACER_HOST_DEVICE bool has_history(const Fp8Target& to) { return to.state != nullptr && to.state->count > 0; }
// A measurement that nobody needs.
PACER_HOST_DEVICE bool is_superfluous(const Fp8Target& to) { return to.codes == nullptr && has_history(to); }

PACER_HOST_DEVICE float fp8_scale(const Fp8Target& to) {
  return has_history(to) ? to.state->scale : fp8_scale(*to.measured, to.format, to.rule);
}

// Bits of what `inverse` becomes at least, for a part of the tensor with that amax: the largest counts.
PACER_HOST_DEVICE uint32_t inverse_bits(uint32_t amax, float scale) {
  return is_finite_amax(amax) ? bits_of(div_(1.0f, scale)) : 0x7FC00000u;
}

}  // namespace pacer::kernels
