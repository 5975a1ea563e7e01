// Balanced cuts against all cuts that there are.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <pacer/core/error.h>
#include <pacer/parallel/pipeline_cut.h>

#include "support/catch.h"

namespace pacer::testing {
namespace {

using Bounds = std::vector<int64_t>;

double largest_sum(const std::vector<double>& costs, const Bounds& bounds) {
  double largest = 0;
  for (size_t part = 0; part + 1 < bounds.size(); ++part) {
    double sum = 0;
    for (int64_t i = bounds[part]; i < bounds[part + 1]; ++i) sum += costs[i];
    largest = std::max(largest, sum);
  }
  return largest;
}

// All cuts, those whose earlier parts are larger first.
void add_cuts(int64_t blocks, int64_t parts, Bounds& start, std::vector<Bounds>& cuts) {
  if (parts == 0) {
    if (start.back() == blocks) cuts.push_back(start);
    return;
  }
  for (int64_t end = blocks; end > start.back(); --end) {
    start.push_back(end);
    add_cuts(blocks, parts - 1, start, cuts);
    start.pop_back();
  }
}

Bounds best_of_all(const std::vector<double>& costs, int64_t parts) {
  std::vector<Bounds> cuts;
  Bounds start = {0};
  add_cuts(static_cast<int64_t>(costs.size()), parts, start, cuts);
  return *std::min_element(cuts.begin(), cuts.end(), [&](const Bounds& a, const Bounds& b) {
    return largest_sum(costs, a) < largest_sum(costs, b);
  });
}

}  // namespace

TEST_CASE("a balanced cut is the best of all cuts, and of equals the one with the larger early parts",
          "[pipeline]") {
  std::mt19937_64 random(11);
  std::uniform_real_distribution<double> real(0, 1);
  for (int64_t blocks = 1; blocks <= 9; ++blocks) {
    for (int64_t parts = 1; parts <= std::min<int64_t>(blocks, 5); ++parts) {
      for (int round = 0; round < 60; ++round) {
        std::vector<double> costs(blocks);
        // Small whole numbers have many equal sums, zeros among them; others hardly any.
        for (double& cost : costs) cost = round % 2 == 0 ? static_cast<double>(random() % 4) : real(random);
        CAPTURE(costs, parts);
        REQUIRE(balanced_cut(costs, parts) == best_of_all(costs, parts));
      }
    }
  }
}

TEST_CASE("equal blocks are shared out evenly, the rest to the first parts", "[pipeline]") {
  REQUIRE(balanced_cut({1, 1, 1, 1, 1, 1}, 3) == Bounds{0, 2, 4, 6});
  REQUIRE(balanced_cut({3, 1, 1, 1, 2}, 2) == Bounds{0, 2, 5});
  REQUIRE(balanced_cut({0, 0, 0}, 2) == Bounds{0, 2, 3});
  REQUIRE(balanced_cut({0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1}, 3) == Bounds{0, 3, 6, 7});
  REQUIRE(balanced_cut({1e308, 1e308}, 2) == Bounds{0, 1, 2});
  REQUIRE(balanced_cut({1e308, 1e308, 1}, 2) == Bounds{0, 1, 3});
  REQUIRE(balanced_cut({1e308, 1e308, 1e308}, 2) == Bounds{0, 2, 3});  // every sum is infinite
}

TEST_CASE("a cut of nonsense is refused", "[pipeline]") {
  using Catch::Matchers::ContainsSubstring;
  REQUIRE_THROWS_WITH(balanced_cut({1, 1}, 0), ContainsSubstring("0 parts"));
  REQUIRE_THROWS_WITH(balanced_cut({1, 1}, 3), ContainsSubstring("3 parts of 2 blocks"));
  REQUIRE_THROWS_WITH(balanced_cut({}, 1), ContainsSubstring("1 parts of 0 blocks"));
  for (const double cost : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    REQUIRE_THROWS_WITH(balanced_cut({1, cost}, 1), ContainsSubstring("block 1 costs"));
  }
}

}  // namespace pacer::testing
