// The gradient norm and the finite check on the CPU: the bits of the specified order of summation, for every
// type and size of a unit, and no infinity or NaN overlooked.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <pacer/core/reduction_order.h>
#include <pacer/kernels/norm.h>

#include "support/catch.h"
#include "support/kernels/norm_input.h"
#include "support/kernels/reduction_reference.h"
#include "support/samples.h"

namespace pacer::kernels::testing {
namespace {

using pacer::testing::Samples;

constexpr double kDoubleInfinity = std::numeric_limits<double>::infinity();

GradientCheck checked(const std::vector<double>& partials, int64_t skipped_before = 0) {
  GradientCheck check{-1, -1, -1, 77, 1, skipped_before};
  finish_check_cpu(partials.data(), static_cast<int64_t>(partials.size()), GuardRule{}, &check);
  return check;
}

}  // namespace

TEST_CASE("the sum of squares has the bits of the specified order", "[kernels][norm]") {
  for (const GradientType type : kAllGradientTypes) {
    NormInput input(type, kReductionUnit);
    input.fill(1);
    Samples samples(2);
    std::vector<int64_t> counts{1, 2, 3, 4, 5, 2047, 2048, 2049, 4095, 4096, 4097, 8191, 30721, 32767, 32768};
    for (int i = 0; i < 25; ++i) counts.push_back(1 + samples.below(kReductionUnit));
    for (const int64_t count : counts) {
      INFO("type " << static_cast<int>(type) << ", " << count << " elements");
      REQUIRE(input.sum(count) == input.expected(count));
    }
  }
}

TEST_CASE("the sum of squares does not depend on the alignment of the memory", "[kernels][norm]") {
  for (const GradientType type : kAllGradientTypes) {
    for (const int64_t count : {1, 100, 5000, 32768}) {
      const double expected = NormInput(type, count).fill(3).sum();
      for (int shift = 1; shift < 8; ++shift) CHECK(NormInput(type, count, shift).fill(3).sum() == expected);
    }
  }
}

TEST_CASE("sums of squares that need no rounding are exact", "[kernels][norm]") {
  for (const GradientType type : kAllGradientTypes) {
    NormInput input(type, kReductionUnit);
    for (int64_t i = 0; i < kReductionUnit; ++i) input.set(i, static_cast<double>(i % 5) - 2);
    // 4, 1, 0, 1, 4 over and over
    for (const int64_t groups : {1, 2, 100, 6553})
      CHECK(input.sum(5 * groups) == 10.0 * static_cast<double>(groups));
    CHECK(input.sum(kReductionUnit) == 10.0 * 6553 + 4 + 1 + 0);
    CHECK(input.sum(1) == 4.0);
  }
}

TEST_CASE("the sum of squares of denormals is computed in full whatever the caller's mode",
          "[kernels][norm]") {
  NormInput halves(GradientType::f16, 100), doubles(GradientType::f64, 100);
  for (int64_t i = 0; i < 100; ++i) {
    halves.set(i,
               0x1p-24 * static_cast<double>(i % 9));  // denormal in fp16, their squares are normal in fp32
    doubles.set(i, 0x1p-530);                          // the squares are denormal
  }
  const double expected = halves.sum(), expected_of_doubles = doubles.sum();
  CHECK(expected > 0);
  CHECK(expected_of_doubles == std::ldexp(100.0, -1060));
  const double tiny[] = {0x1p-1074, 0x1p-1060};
  GradientCheck check{}, flushed_check{};
  finish_check_cpu(tiny, 2, GuardRule{}, &check);
  CHECK(check.sum_of_squares == 0x1p-1074 + 0x1p-1060);
#if defined(__SSE2__)
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  const double flushed = halves.sum(), flushed_doubles = doubles.sum();
  finish_check_cpu(tiny, 2, GuardRule{}, &flushed_check);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  CHECK((after & 0x8040) == 0x8040);
  CHECK(flushed == expected);
  CHECK(flushed_doubles == expected_of_doubles);
  CHECK(std::memcmp(&flushed_check, &check, sizeof check) == 0);
#endif
}

TEST_CASE("one infinity or NaN anywhere makes the sum of squares non-finite", "[kernels][norm]") {
  for (const GradientType type : kAllGradientTypes) {
    for (const int64_t count : {1, 2, 33, 2048, 2049, 32768}) {
      for (const int64_t place : {int64_t{0}, count / 2, count - 1}) {
        for (const double poison : {std::nan(""), kDoubleInfinity, -kDoubleInfinity}) {
          NormInput input(type, count);
          input.set(place, poison);
          REQUIRE_FALSE(std::isfinite(input.sum()));
        }
      }
    }
  }
}

TEST_CASE("a sum of squares that overflows is non-finite", "[kernels][norm]") {
  NormInput single(GradientType::f32, 2), brain(GradientType::bf16, 2), wide(GradientType::f64, 2);
  for (NormInput* input : {&single, &brain}) {
    input->set(0, 0x1p63);
    CHECK(std::isfinite(input->sum()));
    input->set(1, 0x1p64);
    CHECK(std::isinf(input->sum()));
  }
  wide.set(0, 1e155);
  CHECK(std::isinf(wide.sum()));
  // No sum of fp16 numbers overflows: 32,768 times the largest.
  NormInput half(GradientType::f16, kReductionUnit);
  for (int64_t i = 0; i < kReductionUnit; ++i) half.set(i, 65504);
  CHECK(half.sum() == Catch::Approx(32768.0 * 65504.0 * 65504.0));
}

TEST_CASE("the check adds the partial sums in order and takes the root", "[kernels][norm]") {
  Samples samples(4);
  for (const size_t count : {1, 2, 255, 256, 257, 1000, 20000}) {
    std::vector<double> partials(count);
    for (double& partial : partials) partial = samples.log_uniform(1e-3, 1e9);
    const GradientCheck check = checked(partials);
    const double sum = pacer::testing::sum_of_units(static_cast<int64_t>(count), partials.data());
    CHECK(check.sum_of_squares == sum);
    CHECK(check.norm == std::sqrt(sum));
    CHECK(check.non_finite == 0);
  }
  CHECK(checked({9, 16}).norm == 5.0);
}

TEST_CASE("the check of no gradients at all is zero and finite", "[kernels][norm]") {
  const GradientCheck check = checked({});
  CHECK(check.sum_of_squares == 0.0);
  CHECK(check.norm == 0.0);
  CHECK(check.non_finite == 0);
  CHECK(check.skipped_steps == 0);
}

TEST_CASE("one non-finite partial sum anywhere sets the flag and counts a skipped step", "[kernels][norm]") {
  for (const size_t place : {0, 1, 300, 511, 512, 999}) {
    for (const double poison : {std::nan(""), kDoubleInfinity}) {
      std::vector<double> partials(1000, 2.0);
      partials[place] = poison;
      const GradientCheck check = checked(partials, 41);
      CHECK(check.non_finite == 1);
      CHECK(check.skipped_steps == 42);
    }
  }
  CHECK(checked({std::nan(""), kDoubleInfinity}, 5).skipped_steps == 6);  // counts checks, not numbers
  CHECK(checked({1.0, 2.0}, 41).skipped_steps == 41);
}

TEST_CASE("finite partial sums whose total overflows set the flag", "[kernels][norm]") {
  // Else the clip factor would become max_norm / infinity = 0, and the step would be taken with gradients of
  // zero.
  const GradientCheck check = checked({1e308, 1e308}, 3);
  CHECK(std::isinf(check.sum_of_squares));
  CHECK(check.non_finite == 1);
  CHECK(check.skipped_steps == 4);
}

}  // namespace pacer::kernels::testing
