// A bf16 and its 8-bit correction against their restatement in double: every pair, every boundary of rounding.
#include <cmath>
#include <cstdint>
#include <limits>

#include <pacer/kernels/math/weight_correction.h>

#include "support/catch.h"
#include "support/kernels/correction_reference.h"

namespace pacer::kernels::testing {
namespace {

using pacer::testing::corrected;
using pacer::testing::correction_of;
using pacer::testing::for_floats_around_every_boundary;
using pacer::testing::half_spacing;
using pacer::testing::kBFloat16Format;
using pacer::testing::nearest_half;
using pacer::testing::same_number;
using pacer::testing::Ties;

constexpr float kBeyondAll = std::numeric_limits<float>::infinity();

// Calls visit(bf16, correction) for every pair that a finite float can have become.
template <class Visit>
void for_every_pair(const Visit& visit) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const int magnitude = bits & 0x7FFF, largest = bits % 2 == 0 ? 127 : 126;
    if (magnitude > 0x7F80) continue;
    for (int correction = -largest; correction <= largest; ++correction) {
      const bool is_inward = (correction < 0) != (bits >= 0x8000);
      if (correction != 0 && (is_inward ? magnitude == 0 : magnitude == 0x7F80)) continue;
      visit(BFloat16{static_cast<uint16_t>(bits)}, static_cast<int8_t>(correction));
    }
  }
}

}  // namespace

TEST_CASE("every bf16 and correction become a float, and that float the same two", "[kernels][half]") {
  int64_t pairs = 0, wrong = 0;
  for_every_pair([&](BFloat16 rounded, int8_t correction) {
    const BFloat16AndCorrection again = split_24(join_24(rounded, correction));
    wrong += again.rounded.bits != rounded.bits || again.correction != correction;
    ++pairs;
  });
  CHECK(wrong == 0);
  // 2 x 32,640 finite numbers have 255 or 253 corrections, but zeros half of 255; infinities have the other half.
  CHECK(pairs == 2 * (16320 * int64_t{255} + 16320 * int64_t{253} - 127 + 128));
}

TEST_CASE("a bf16 and its correction stand for the value of their definition, rounded to fp32",
          "[kernels][half]") {
  int64_t wrong = 0;
  for_every_pair([&](BFloat16 rounded, int8_t correction) {
    const bool is_chosen = correction % 9 == 0 || std::abs(correction) >= 126 || std::abs(correction) <= 2;
    if (!is_chosen || (correction == 0 && (rounded.bits & 0x7FFF) == 0)) return;
    wrong += join_24(rounded, correction) != static_cast<float>(corrected(rounded.bits, correction));
  });
  CHECK(wrong == 0);
  CHECK(bits_of(join_24({0x0000}, 0)) == 0);
  CHECK(bits_of(join_24({0x8000}, 0)) == 0x80000000u);
}

TEST_CASE("a float becomes the nearest bf16, ties to even, and the nearest correction", "[kernels][half]") {
  int64_t wrong_rounded = 0, wrong_corrections = 0, too_far = 0, too_far_relative = 0;
  for_floats_around_every_boundary(16, [&](float value) {
    if (!std::isfinite(value)) return;
    const auto [rounded, correction] = split_24(value);
    const double p = pacer::testing::decode_half(rounded.bits, kBFloat16Format);
    wrong_rounded += !same_number(p, nearest_half(value, kBFloat16Format, Ties::to_even));
    wrong_corrections += correction != correction_of(value, rounded.bits);
    // The neighbour towards the value is as far as numbers are at the value's magnitude.
    const double spacing = half_spacing(value, kBFloat16Format);
    double back = join_24(rounded, correction);
    if (std::isinf(back)) back = std::copysign(0x1p128, back);
    const bool is_at_end = rounded.bits % 2 == 1 && std::abs(correction) == 126;
    too_far += std::abs(back - value) > (is_at_end ? 257 : 129) * 0x1p-16 * spacing;
    if (std::abs(value) >= 0x1p-126) too_far_relative += std::abs(back - value) > 0x1p-15 * std::abs(value);
  });
  CHECK(wrong_rounded == 0);
  CHECK(wrong_corrections == 0);
  CHECK(too_far == 0);
  CHECK(too_far_relative == 0);
}

TEST_CASE("the conversions for numbers alone have the bits of the others", "[kernels][half]") {
  int64_t wrong = 0, unseen = 0;
  for (int bits = 0; bits < 0x10000; ++bits) {
    for (int correction = -127; correction <= 127; ++correction) {
      const BFloat16 rounded{static_cast<uint16_t>(bits)};
      const float value = join_24(rounded, static_cast<int8_t>(correction));
      const uint32_t high = static_cast<uint32_t>(bits) << 16;
      const uint32_t joined = join_24_unwritten(high, correction);
      // What somebody has written is no number here.
      const bool was_written = bits_of(value) == high && correction != 0;
      unseen += (was_written || std::isnan(value)) && !std::isnan(float_of(joined));
      if (was_written || std::isnan(value)) continue;
      wrong += joined != bits_of(value);
      const BFloat16AndCorrection both = split_24(value);
      const HighAndCorrection split = split_24_number(joined);
      wrong += split.high >> 16 != both.rounded.bits || (split.high & 0xFFFFu) != 0 ||
               split.correction != both.correction;
    }
  }
  CHECK(wrong == 0);
  CHECK(unseen == 0);
  for_floats_around_every_boundary(16, [&](float value) {
    if (std::isnan(value)) return;
    const BFloat16AndCorrection both = split_24(value);
    const HighAndCorrection split = split_24_number(bits_of(value));
    wrong += split.high >> 16 != both.rounded.bits || split.correction != both.correction;
  });
  CHECK(wrong == 0);
}

TEST_CASE("corrections at a power of two have their whole range on both sides", "[kernels][half]") {
  CHECK(split_24(0x1.01p0f).rounded.bits == 0x3F80);  // a tie: even is 1
  CHECK(split_24(0x1.01p0f).correction == 127);
  CHECK(split_24(0x1.FFp-1f).rounded.bits == 0x3F80);  // a tie below: even is 1, too
  CHECK(split_24(0x1.FFp-1f).correction == -127);
  CHECK(split_24(-0x1.FFp-1f).correction == 127);
  CHECK(split_24(0x1.008p0f).correction == 64);  // 63.5 steps, away from zero
  CHECK(split_24(0x1.FF8p-1f).correction == -64);
  CHECK(split_24(0x1.02FFFEp0f).rounded.bits == 0x3F81);  // below a tie: odd, with no 127
  CHECK(split_24(0x1.02FFFEp0f).correction == 126);
}

TEST_CASE("zeros, infinities and NaN have no correction, and keep none that is not theirs",
          "[kernels][half]") {
  for (const float value : {0.0f, -0.0f, kBeyondAll, -kBeyondAll, std::nanf("")}) {
    CHECK(split_24(value).correction == 0);
    CHECK(same_number(join_24(split_24(value).rounded, 0), value));
  }
  CHECK(split_24(std::nanf("")).rounded.bits == kBFloat16NaN);
  CHECK(split_24(-std::nanf("")).rounded.bits == kBFloat16NaN);
  CHECK(split_24(0x1.FFFFFEp127f).rounded.bits == 0x7F80);  // 2^128 but for one of its own spacings
  CHECK(split_24(0x1.FFFFFEp127f).correction == 0);
  CHECK(join_24({0x7F80}, -1) == 0x1.FFFDFCp127f);
  for (const int correction : {1, 64, 127}) {  // somebody else has written these numbers
    CHECK(bits_of(join_24({0x0000}, static_cast<int8_t>(-correction))) == 0);
    CHECK(bits_of(join_24({0x8000}, static_cast<int8_t>(correction))) == 0x80000000u);
    CHECK(join_24({0x7F80}, static_cast<int8_t>(correction)) == kBeyondAll);
    CHECK(join_24({0xFF80}, static_cast<int8_t>(-correction)) == -kBeyondAll);
    CHECK(std::isnan(join_24({0x7FC0}, static_cast<int8_t>(correction))));
    CHECK(std::isnan(join_24({0x7F81}, static_cast<int8_t>(-correction))));
  }
}

}  // namespace pacer::kernels::testing
