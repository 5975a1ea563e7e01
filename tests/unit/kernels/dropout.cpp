// Dropout: how many elements stay, that seeds and neighbours know nothing of each other, and that the mean
// stays.
#include "support/catch.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include <pacer/kernels/math/dropout.h>

namespace pacer::testing::kernels_dropout {
namespace {

using kernels::Dropout;
using kernels::dropout_of;

constexpr int64_t kElements = int64_t{1} << 20;

// Whether each element stays.
std::vector<bool> mask_of(const Dropout& dropout) {
  std::vector<bool> mask;
  mask.reserve(kElements);
  for (int64_t four = 0; four < kElements / 4; ++four) {
    const PhiloxCounter draws = kernels::dropout_draws(dropout, four);
    for (const uint32_t draw : draws.word) mask.push_back(kernels::drop(dropout, draw, 1.0f) != 0.0f);
  }
  return mask;
}

int64_t count_of(const std::vector<bool>& mask) { return std::count(mask.begin(), mask.end(), true); }

// Within five standard deviations of what `trials` independent draws of that probability give.
void check_share(int64_t found, int64_t trials, double probability) {
  const double expected = probability * static_cast<double>(trials);
  CAPTURE(found, expected);
  CHECK(std::abs(static_cast<double>(found) - expected) <=
        5 * std::sqrt(expected * (1 - probability)) + 1e-9);
}

int64_t agreements(const std::vector<bool>& a, const std::vector<bool>& b, size_t shift) {
  int64_t count = 0;
  for (size_t i = shift; i < a.size(); ++i) count += a[i] == b[i - shift];
  return count;
}

constexpr double kProbabilities[] = {0.01, 0.1, 0.25, 0.5, 0.9, 0.999};

}  // namespace

TEST_CASE("dropout keeps a share of 1 - p", "[kernels][dropout]") {
  for (const double p : kProbabilities) {
    for (const uint64_t seed : {uint64_t{0}, uint64_t{7}, ~uint64_t{0}}) {
      CAPTURE(p, seed);
      check_share(count_of(mask_of(dropout_of(p, seed))), kElements, 1 - p);
    }
  }
}

TEST_CASE("dropout of p = 0 drops nothing and changes no value", "[kernels][dropout]") {
  const Dropout none = dropout_of(0, 3);
  CHECK(none.threshold == 0);
  CHECK(count_of(mask_of(none)) == kElements);
  for (const uint32_t draw : {0u, 1u, ~0u}) CHECK(kernels::drop(none, draw, 0.3f) == 0.3f);
  CHECK(kernels::drop(Dropout{}, 0, -1.5f) == -1.5f);
}

TEST_CASE("dropout keeps the mean of what it drops from", "[kernels][dropout]") {
  for (const double p : kProbabilities) {
    const Dropout dropout = dropout_of(p, 21);
    CAPTURE(p);
    CHECK(dropout.scale == static_cast<float>(1 / (1 - p)));
    double sum = 0;
    for (int64_t four = 0; four < kElements / 4; ++four) {
      const PhiloxCounter draws = kernels::dropout_draws(dropout, four);
      for (int k = 0; k < 4; ++k) {
        const float value = 1.0f + static_cast<float>(four % 3);  // 1, 2 and 3, whose mean is 2
        sum += kernels::drop(dropout, draws.word[k], value);
      }
    }
    const double mean = sum / static_cast<double>(kElements);
    const double deviation = std::sqrt((14.0 / 3) * p / (1 - p) / static_cast<double>(kElements));
    CHECK(std::abs(mean - 2) <= 5 * deviation + 1e-5);
  }
}

TEST_CASE("masks of different seeds, and elements of one mask, are independent", "[kernels][dropout]") {
  for (const double p : {0.1, 0.5}) {
    const double alike = p * p + (1 - p) * (1 - p);
    const std::vector<bool> mask = mask_of(dropout_of(p, 1));
    for (const uint64_t other :
         {uint64_t{0}, uint64_t{2}, (uint64_t{1} << 32) + 1, (uint64_t{1} << 63) + 1}) {
      CAPTURE(p, other);
      check_share(agreements(mask, mask_of(dropout_of(p, other)), 0), kElements, alike);
    }
    // Neighbours share pairs, so that their agreements vary more than independent draws: at most twice.
    for (const size_t shift : {1u, 2u, 3u, 4u, 4096u}) {
      CAPTURE(p, shift);
      const auto trials = static_cast<double>(kElements - static_cast<int64_t>(shift));
      const auto found = static_cast<double>(agreements(mask, mask, shift));
      CHECK(std::abs(found - alike * trials) <= 10 * std::sqrt(alike * (1 - alike) * trials));
    }
    CHECK(mask == mask_of(dropout_of(p, 1)));
  }
}

}  // namespace pacer::testing::kernels_dropout
