// Weights in 24 bits: a bf16 and an int8 correction of it, and their conversions from and to float (FlashOptim,
// arXiv:2602.23349). All of it is integer arithmetic, so that CPU and GPU agree to the bit.
//
//   p = w, rounded to nearest even        c = round(127 (w - p) / h)        w' = p + c h / 127, rounded to fp32
//
// h is half the distance of p to its neighbour among bf16 numbers on the side where w lies. Below a power of two it is
// half of that above, so that a correction has its whole range on both sides. As bits of floats that grow with the
// magnitude, h is 2^15 everywhere, below and above powers of two and among subnormals.
//
// A correction of 127 lies exactly between two bf16 numbers, which rounds to the even one. So an odd p has at most 126,
// and p and c of any w become the same p and c again. w' is at most 129 * 2^-16 of p's spacing from w, or 257 * 2^-16
// where 127 was not to be had: 2^-15 of w at most, for all w above 2^-126.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/half_types.h>

namespace pacer::kernels {

constexpr int32_t kLargestCorrection = 127;

// NaN is stored as 0x7FC0 with correction 0. A float within 128 of its own spacings of 2^128 becomes infinity.
struct BFloat16AndCorrection {
  BFloat16 rounded;
  int8_t correction;
};

PACER_HOST_DEVICE BFloat16AndCorrection split_24(float value) {
  const uint32_t bits = bits_of(value);
  const BFloat16 rounded = to_bfloat16(value);
  const auto apart = static_cast<int32_t>(bits - (static_cast<uint32_t>(rounded.bits) << 16));
  const int32_t distance = apart < 0 ? -apart : apart;  // at most 2^15
  const int32_t largest = kLargestCorrection - (rounded.bits & 1);
  const int32_t nearest = (distance * kLargestCorrection + (1 << 14)) >> 15;
  const int32_t magnitude = nearest < largest ? nearest : largest;
  const bool is_negative = (bits >> 31 != 0) != (apart < 0);
  const int32_t correction = is_nan_bits(bits) ? 0 : is_negative ? -magnitude : magnitude;
  return {rounded, static_cast<int8_t>(correction)};
}

// The inverse of split_24. A zero is never left with a correction towards the other sign, nor an infinity with one
// beyond it. Where one is found, somebody else has written that number, and it stands without a correction.
PACER_HOST_DEVICE float join_24(BFloat16 rounded, int8_t correction) {
  const uint32_t high = static_cast<uint32_t>(rounded.bits) << 16;
  const uint32_t magnitude = rounded.bits & 0x7FFFu;
  const bool is_inward = (correction < 0) != ((rounded.bits & 0x8000u) != 0);
  const bool was_written = is_inward ? magnitude == 0 : magnitude >= 0x7F80u;
  const int32_t steps = correction < 0 ? -correction : correction;
  // 33026 / 2^7 is 2^15 / 127 to seven digits, and gives the nearest integer of the product for every correction.
  const auto distance = static_cast<uint32_t>((steps * 33026 + (1 << 6)) >> 7);
  return float_of(was_written ? high : is_inward ? high - distance : high + distance);
}

// An integer divided by 2^places and rounded to nearest, ties away from zero.
PACER_HOST_DEVICE int32_t nearest_shift(int32_t value, int places) {
  return (value + (1 << (places - 1)) + (value >> 31)) >> places;
}

// A number with the sign of the float that these are the bits of.
PACER_HOST_DEVICE int32_t with_sign_of(uint32_t bits, int32_t number) {
  return (static_cast<int32_t>(bits) >> 31) * 2 * number + number;
}

// What join_24 makes of the two, as bits, given the bf16 above 16 zeros. Where join_24 finds that somebody has written the
// bf16, this makes a NaN.
PACER_HOST_DEVICE uint32_t join_24_unwritten(uint32_t high, int32_t correction) {
  return high + static_cast<uint32_t>(nearest_shift(correction * with_sign_of(high, 33026), 7));
}

// What split_24 makes of a float that is not NaN, with the bf16 above 16 zeros.
struct HighAndCorrection {
  uint32_t high;
  int32_t correction;
};
PACER_HOST_DEVICE HighAndCorrection split_24_number(uint32_t bits) {
  const uint32_t high = (bits + 0x7FFFu + (bits >> 16 & 1)) & 0xFFFF0000u;
  const auto apart = static_cast<int32_t>(bits - high);
  const int32_t nearest = nearest_shift(apart * with_sign_of(bits, kLargestCorrection), 15);
  const int32_t largest = kLargestCorrection - static_cast<int32_t>(high >> 16 & 1);
  const int32_t not_above = nearest < largest ? nearest : largest;
  return {high, not_above > -largest ? not_above : -largest};
}

}  // namespace pacer::kernels
