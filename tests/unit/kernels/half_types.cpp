// bf16 and fp16 conversions of the host against a restatement in double arithmetic, for every 16-bit number
// and for all the floats around every boundary of rounding. tests/property has the run over all 2^32 floats.
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include <pacer/kernels/math/half_types.h>

#include "support/catch.h"
#include "support/kernels/half_reference.h"
#include "support/samples.h"

namespace pacer::kernels::testing {
namespace {

using pacer::testing::decode_half;
using pacer::testing::for_floats_around_every_boundary;
using pacer::testing::kBFloat16Format;
using pacer::testing::kFloat16Format;
using pacer::testing::nearest_half;
using pacer::testing::same_number;
using pacer::testing::Samples;
using pacer::testing::Ties;

constexpr float kFloatInfinity = std::numeric_limits<float>::infinity();

bool is_quiet_nan(BFloat16 value) { return (value.bits & 0x7FC0) == 0x7FC0; }
bool is_quiet_nan(Float16 value) { return (value.bits & 0x7E00) == 0x7E00; }

}  // namespace

TEST_CASE("every bf16 becomes the float of the same value", "[kernels][half]") {
  int wrong = 0;
  for (int bits = 0; bits < 0x10000; ++bits) {
    const BFloat16 value{static_cast<uint16_t>(bits)};
    wrong += !same_number(to_float(value), decode_half(value.bits, kBFloat16Format));
  }
  CHECK(wrong == 0);
}

TEST_CASE("every fp16 becomes the float of the same value", "[kernels][half]") {
  int wrong = 0;
  for (int bits = 0; bits < 0x10000; ++bits) {
    const Float16 value{static_cast<uint16_t>(bits)};
    wrong += !same_number(to_float(value), decode_half(value.bits, kFloat16Format));
  }
  CHECK(wrong == 0);
}

TEST_CASE("every 16-bit number survives the way to float and back", "[kernels][half]") {
  int wrong_bfloat16 = 0, wrong_float16 = 0;
  for (int bits = 0; bits < 0x10000; ++bits) {
    const BFloat16 b{static_cast<uint16_t>(bits)};
    const Float16 h{static_cast<uint16_t>(bits)};
    wrong_bfloat16 += std::isnan(to_float(b)) ? !is_quiet_nan(to_bfloat16(to_float(b)))
                                              : to_bfloat16(to_float(b)).bits != b.bits;
    wrong_float16 += std::isnan(to_float(h)) ? !is_quiet_nan(to_float16(to_float(h)))
                                             : to_float16(to_float(h)).bits != h.bits;
  }
  CHECK(wrong_bfloat16 == 0);
  CHECK(wrong_float16 == 0);
}

TEST_CASE("a float becomes the nearest bf16, ties to even", "[kernels][half]") {
  int64_t wrong = 0;
  for_floats_around_every_boundary(16, [&](float value) {
    const BFloat16 result = to_bfloat16(value);
    if (std::isnan(value)) {
      wrong += !is_quiet_nan(result);
    } else if (std::isinf(value)) {
      wrong += decode_half(result.bits, kBFloat16Format) != value;
    } else {
      wrong += !same_number(decode_half(result.bits, kBFloat16Format),
                            nearest_half(value, kBFloat16Format, Ties::to_even));
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE("a float becomes the nearest fp16, ties to even", "[kernels][half]") {
  int64_t wrong = 0;
  for_floats_around_every_boundary(19, [&](float value) {
    const Float16 result = to_float16(value);
    if (std::isnan(value)) {
      wrong += !is_quiet_nan(result);
    } else if (std::isinf(value)) {
      wrong += decode_half(result.bits, kFloat16Format) != value;
    } else {
      wrong += !same_number(decode_half(result.bits, kFloat16Format),
                            nearest_half(value, kFloat16Format, Ties::to_even));
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE("conversions to fp16 at the ends of its range", "[kernels][half]") {
  CHECK(to_float16(65504.0f).bits == 0x7BFF);
  CHECK(to_float16(65519.996f).bits == 0x7BFF);
  CHECK(to_float16(65520.0f).bits == 0x7C00);
  CHECK(to_float16(-65520.0f).bits == 0xFC00);
  CHECK(to_float16(0x1p-14f).bits == 0x0400);
  CHECK(to_float16(0x1p-24f).bits == 0x0001);
  CHECK(to_float16(0x1p-25f).bits == 0x0000);    // a tie: even is zero
  CHECK(to_float16(0x1.8p-24f).bits == 0x0002);  // a tie: even is two
  CHECK(to_float16(0x1.002p-25f).bits == 0x0001);
  CHECK(to_float16(-0.0f).bits == 0x8000);
}

TEST_CASE("a bf16 and its remainder rebuild every float exactly", "[kernels][half]") {
  int64_t wrong = 0;
  for_floats_around_every_boundary(16, [&](float value) {
    const BFloat16AndRemainder both = split(value);
    if (std::isnan(value)) {
      wrong += both.rounded.bits != 0x7FC0 || both.remainder != 0;
      wrong += !std::isnan(join(both.rounded, both.remainder));
    } else {
      wrong += bits_of(join(both.rounded, both.remainder)) != bits_of(value);
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE("a bf16 with a remainder is rounded half away from zero", "[kernels][half]") {
  int64_t wrong = 0;
  for_floats_around_every_boundary(16, [&](float value) {
    if (!std::isfinite(value)) return;
    const double expected = nearest_half(value, kBFloat16Format, Ties::away);
    wrong += !same_number(decode_half(split(value).rounded.bits, kBFloat16Format), expected);
  });
  CHECK(wrong == 0);
  CHECK(split(0x1.01p0f).rounded.bits == 0x3F81);  // a tie up, where nearest even stays
  CHECK(split(-0x1.01p0f).rounded.bits == 0xBF81);
  CHECK(split(0x1.01p0f).remainder == 0x8000);
  CHECK(split(kFloatInfinity).rounded.bits == 0x7F80);
  CHECK(split(-kFloatInfinity).rounded.bits == 0xFF80);
  CHECK(split(kFloatInfinity).remainder == 0);
}

TEST_CASE("stochastic rounding has exactly the value as its mean over all random words", "[kernels][half]") {
  Samples samples(2);
  int not_neighbours = 0, biased = 0;
  for (int round = 0; round < 400; ++round) {
    float value = float_of(static_cast<uint32_t>(samples.bits()));
    if (round < 8)
      value = std::array{0.0f, -0.0f, 1.0f, -3.0f, 0x1p-149f, 0x1.FFFFFEp0f, 0x1.01p0f, -0x1p-133f}[round];
    if (!(std::abs(value) < 0x1.FEp127f)) continue;  // NaN, and what may round to infinity
    const double spacing = pacer::testing::half_spacing(value, kBFloat16Format);
    const double below = std::floor(value / spacing) * spacing, above = std::ceil(value / spacing) * spacing;
    int64_t times_above = 0;
    for (uint32_t random = 0; random < 0x10000; ++random) {
      const double result = decode_half(to_bfloat16_stochastic(value, random).bits, kBFloat16Format);
      not_neighbours += result != below && result != above;
      times_above += result != below;
    }
    // All products are exact in double: 8 significant bits times at most 17.
    const double sum =
        below * static_cast<double>(0x10000 - times_above) + above * static_cast<double>(times_above);
    biased += sum != value * 65536.0;
  }
  CHECK(not_neighbours == 0);
  CHECK(biased == 0);
}

TEST_CASE("stochastic rounding rounds to nearest half the time at a tie and never moves a bf16",
          "[kernels][half]") {
  int up = 0, moved = 0;
  for (uint32_t random = 0; random < 0x10000; ++random) {
    up += to_bfloat16_stochastic(0x1.01p0f, random).bits == 0x3F81;
    for (const float value : {1.0f, -1.5f, 0.0f, 0x1.FEp127f, -0x1p-133f, kFloatInfinity, -kFloatInfinity}) {
      const BFloat16 result = to_bfloat16_stochastic(value, random);
      moved += bits_of(to_float(result)) != bits_of(value);
    }
  }
  CHECK(up == 0x8000);
  CHECK(moved == 0);
}

TEST_CASE("stochastic rounding never turns NaN into a number", "[kernels][half]") {
  int64_t wrong = 0;
  for (const uint32_t bits : {0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu, 0xFF800001u, 0xFFFFFFFFu, 0x7FFF0001u}) {
    for (uint32_t random = 0; random < 0x10000; ++random) {
      wrong += !is_quiet_nan(to_bfloat16_stochastic(float_of(bits), random));
    }
  }
  CHECK(wrong == 0);
}

}  // namespace pacer::kernels::testing
