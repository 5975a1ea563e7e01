// The order in which pacer adds numbers, against the same order written as a recursion. Equality is by bits:
// any other order of these additions gives other bits, which the last case makes sure of.
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <pacer/core/reduction_order.h>

#include "support/catch.h"
#include "support/kernels/reduction_reference.h"
#include "support/samples.h"

namespace pacer::testing {
namespace {

template <class Real>
std::vector<Real> numbers_to_add(int64_t count, uint64_t seed) {
  Samples samples(seed);
  std::vector<Real> numbers(static_cast<size_t>(count));
  for (Real& number : numbers) number = static_cast<Real>(samples.log_uniform(1e-6, 1e3));
  return numbers;
}

template <class Real>
bool columns_are_added_in_order(uint64_t seed) {
  std::vector<Real> columns = numbers_to_add<Real>(kReductionColumns, seed);
  const std::vector<Real> kept = columns;
  const Real expected = sum_of_columns<Real>([&](int64_t j) { return kept[static_cast<size_t>(j)]; });
  return fold_columns(columns.data()) == expected;
}

}  // namespace

TEST_CASE("the sizes of the order of summation are as defined", "[core][reduction]") {
  CHECK(kReductionUnit == 32768);
  CHECK(kReductionColumns == 2048);
  CHECK(kPartialColumns == 256);
}

TEST_CASE("columns are added in fours and then by halves", "[core][reduction]") {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    REQUIRE(columns_are_added_in_order<float>(seed));
    REQUIRE(columns_are_added_in_order<double>(seed));
  }
}

TEST_CASE("four neighbouring columns are added as two pairs", "[core][reduction]") {
  // 2^24 absorbs a single 1 but not the sum of two.
  const auto sum_of = [](float c0, float c1, float c2, float c3) {
    std::vector<float> columns(kReductionColumns, 0.0f);
    columns[4] = c0, columns[5] = c1, columns[6] = c2, columns[7] = c3;
    return fold_columns(columns.data());
  };
  CHECK(sum_of(0x1p24f, 0, 1, 1) == 0x1p24f + 2);
  CHECK(sum_of(1, 1, 0x1p24f, 0) == 0x1p24f + 2);
  CHECK(sum_of(0x1p24f, 1, 1, 0) == 0x1p24f);
}

TEST_CASE("the sums of the units are added in order for every number of units", "[core][reduction]") {
  const std::vector<double> units = numbers_to_add<double>(70000, 7);
  for (int64_t count = 0; count <= 1100; ++count) {
    REQUIRE(sum_partials(units.data(), count) == sum_of_units(count, units.data()));
  }
  for (const int64_t count : {4095, 4096, 65535, 65536, 65537, 70000}) {
    CHECK(sum_partials(units.data(), count) == sum_of_units(count, units.data()));
  }
}

TEST_CASE("no units at all have the sum zero", "[core][reduction]") {
  CHECK(sum_partials(nullptr, 0) == 0.0);
  CHECK_FALSE(std::signbit(sum_partials(nullptr, 0)));
}

TEST_CASE("a NaN or an infinity in any unit reaches the sum", "[core][reduction]") {
  for (const int64_t place : {0, 1, 255, 256, 300, 511}) {
    std::vector<double> units(512, 1.0);
    units[static_cast<size_t>(place)] = std::numeric_limits<double>::quiet_NaN();
    CHECK(std::isnan(sum_partials(units.data(), 512)));
    units[static_cast<size_t>(place)] = std::numeric_limits<double>::infinity();
    CHECK(std::isinf(sum_partials(units.data(), 512)));
  }
}

TEST_CASE("other orders of the same additions give other bits", "[core][reduction]") {
  int other_from_left = 0, other_by_halves = 0, other_fours = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const std::vector<float> columns = numbers_to_add<float>(kReductionColumns, seed);
    const auto column = [&](int64_t j) { return columns[static_cast<size_t>(j)]; };
    const float specified = sum_of_columns<float>(column);
    float from_left = 0;
    for (const float value : columns) from_left += value;
    other_from_left += specified != from_left;
    other_by_halves += specified != sum_by_halves<float>(2048, column);
    other_fours += specified != sum_of_columns<float>([&](int64_t j) { return column(j % 4 * 512 + j / 4); });
  }
  CHECK(other_from_left > 30);
  CHECK(other_by_halves > 30);
  CHECK(other_fours > 30);
}

}  // namespace pacer::testing
