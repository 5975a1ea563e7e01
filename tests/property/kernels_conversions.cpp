// Conversions of floats to 16-bit formats over the whole line of floats: every 4,099th, or all 2^32 of them
// with PACER_TEST_LONG=1. What decides at the boundaries of rounding is in tests/unit/kernels/half_types.cpp.
#include <cmath>
#include <cstdint>
#include <cstring>

#include <pacer/kernels/math/half_types.h>

#include "support/catch.h"
#include "support/kernels/half_reference.h"
#include "support/samples.h"

// The compiler's own fp16, where it has one.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__FLT16_MANT_DIG__)
#define PACER_HAS_COMPILER_FLOAT16 1
#else
#define PACER_HAS_COMPILER_FLOAT16 0
#endif

namespace pacer::kernels::testing {
namespace {

using pacer::testing::decode_half;
using pacer::testing::kBFloat16Format;
using pacer::testing::kFloat16Format;
using pacer::testing::nearest_half;
using pacer::testing::same_number;
using pacer::testing::Ties;
using pacer::testing::wants_long_tests;

// Number of floats for which `is_right` is false.
template <class IsRight>
int64_t count_wrong(const IsRight& is_right) {
  const uint64_t stride = wants_long_tests() ? 1 : 4099;
  int64_t wrong = 0;
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += stride) {
    wrong += !is_right(float_of(static_cast<uint32_t>(bits)));
  }
  return wrong;
}

// NaN and infinity stay what they are.
double nearest_or_special(float value, pacer::testing::HalfFormat format, Ties ties) {
  return std::isfinite(value) ? nearest_half(value, format, ties) : value;
}

}  // namespace

TEST_CASE("all floats become the nearest bf16", "[kernels][half]") {
  CHECK(count_wrong([](float value) {
          return same_number(decode_half(to_bfloat16(value).bits, kBFloat16Format),
                             nearest_or_special(value, kBFloat16Format, Ties::to_even));
        }) == 0);
}

TEST_CASE("all floats become the nearest fp16", "[kernels][half]") {
  CHECK(count_wrong([](float value) {
          return same_number(decode_half(to_float16(value).bits, kFloat16Format),
                             nearest_or_special(value, kFloat16Format, Ties::to_even));
        }) == 0);
}

TEST_CASE("all floats survive as a bf16 and a remainder", "[kernels][half]") {
  CHECK(count_wrong([](float value) {
          const BFloat16AndRemainder both = split(value);
          const float joined = join(both.rounded, both.remainder);
          const bool rebuilt = bits_of(joined) == bits_of(value) || (std::isnan(joined) && std::isnan(value));
          return rebuilt && same_number(decode_half(both.rounded.bits, kBFloat16Format),
                                        nearest_or_special(value, kBFloat16Format, Ties::away));
        }) == 0);
}

#if PACER_HAS_COMPILER_FLOAT16
TEST_CASE("all floats become the fp16 that the compiler makes of them", "[kernels][half]") {
  __extension__ using CompilerHalf = _Float16;
  CHECK(count_wrong([](float value) {
          const CompilerHalf half = static_cast<CompilerHalf>(value);
          const Float16 mine = to_float16(value);
          return std::memcmp(&half, &mine, sizeof mine) == 0 ||
                 (std::isnan(value) && (mine.bits & 0x7E00) == 0x7E00);
        }) == 0);
}
#endif

}  // namespace pacer::kernels::testing
