// The guard's rule against hand-computed values: norm, clip factor, loss scale. The sums under it are tested
// with the norm kernels.
#include <cmath>
#include <limits>

#include "support/catch.h"

#include <pacer/kernels/norm.h>

namespace pacer::kernels::testing {
namespace {

GradientCheck after(double sum_of_squares, const GuardRule& rule, GradientCheck check = {}) {
  finish_check_cpu(&sum_of_squares, 1, rule, &check);
  return check;
}

GuardRule clip_at(double max_norm) {
  GuardRule rule;
  rule.max_norm = max_norm;
  return rule;
}

const double kNotFinite = std::numeric_limits<double>::infinity();

}  // namespace

TEST_CASE("a guard without rules has the factor one", "[kernels][guard]") {
  const GradientCheck check = after(25, {});
  CHECK(check.norm == 5);
  CHECK(check.factor == 1);
  CHECK(check.non_finite == 0);
  CHECK(check.loss_scale == 1);
  CHECK(check.skipped_steps == 0);
}

TEST_CASE("before the first look nothing was found and nothing is scaled", "[kernels][guard]") {
  const GradientCheck check;
  CHECK(check.sum_of_squares == 0);
  CHECK(check.norm == 0);
  CHECK(check.factor == 1);
  CHECK(check.non_finite == 0);
  CHECK(check.loss_scale == 1);
  CHECK(check.skipped_steps == 0);
  CHECK(check.finite_steps == 0);
  CHECK(check.last_norm == 0);
}

TEST_CASE("gradients beyond the norm are clipped to it, others are left alone", "[kernels][guard]") {
  CHECK(after(25, clip_at(2)).factor == 0.4);
  CHECK(after(25, clip_at(2)).norm == 5);  // before clipping
  CHECK(after(25, clip_at(5)).factor == 1);
  CHECK(after(25, clip_at(7)).factor == 1);
  CHECK(after(0, clip_at(1)).factor == 1);
}

TEST_CASE("norm and clipping are those of the averaged, unscaled gradient", "[kernels][guard]") {
  GuardRule rule = clip_at(2);
  rule.average = 0.25;
  GradientCheck scaled;
  scaled.loss_scale = 8;
  // Stored: a sum of 4 micro-batches times 8, of norm 160: the mean has norm 160 / 8 / 4 = 5.
  const GradientCheck check = after(160.0 * 160.0, rule, scaled);
  CHECK(check.norm == 5);
  CHECK(check.factor == 0.4 / 8 / 4);
  rule.max_norm = 0;
  CHECK(after(160.0 * 160.0, rule, scaled).factor == 1.0 / 32);
}

TEST_CASE("the last finite norm is kept, and does not change how all gradients are clipped",
          "[kernels][guard]") {
  GuardRule rule = clip_at(2);
  rule.average = 0.5;
  GradientCheck check = after(4 * 64, rule);
  CHECK(check.last_norm == 8);
  check = after(kNotFinite, rule, check);
  CHECK(check.last_norm == 8);
  check = after(std::nan(""), rule, check);
  CHECK(check.last_norm == 8);
  check = after(4 * 25, rule, check);
  CHECK(check.factor == 0.5 * (2.0 / 5));
  CHECK(check.last_norm == 5);
  check = after(4 * 1, rule, check);
  CHECK(check.factor == 0.5);
  CHECK(check.last_norm == 1);
}

TEST_CASE("a part is clipped by the norm before and by its own share", "[kernels][guard]") {
  GuardRule rule = clip_at(2);
  rule.average = 1.0 / 8;  // of two micro-batches on each of four ranks
  GradientCheck before;
  before.loss_scale = 4;
  const auto factor = [&](double norm_of_stored, double last_norm) {
    before.last_norm = last_norm;
    const double sum = norm_of_stored * norm_of_stored;
    double found = -1;
    early_factor_cpu(&sum, /*local_weight=*/4, /*workers=*/4, rule, &before, &found);
    return found;
  };
  const double unclipped = 4.0 / 8 / 4;  // stored gradients become this rank's mean
  CHECK(factor(8, 0) == unclipped);
  CHECK(factor(8, 2) == unclipped);
  CHECK(factor(8, 16) == unclipped / 8);
  CHECK(factor(32, 0) == unclipped);      // its mean's norm is 4 = 2 sqrt(4)
  CHECK(factor(64, 0) == unclipped / 2);  // as is what this leaves
  CHECK(factor(64, 16) == unclipped / 8);
  CHECK(factor(64, 3) == unclipped / 2);
  CHECK(factor(0, 0) == unclipped);
  // The step's own rule multiplies alike where nothing is clipped.
  before.last_norm = 0;
  CHECK(after(1, rule, before).factor * 4 == unclipped);
}

TEST_CASE("a fixed loss scale stays, and only the skipped step is counted", "[kernels][guard]") {
  GradientCheck before;
  before.loss_scale = 4;
  const GradientCheck check = after(kNotFinite, {}, before);
  CHECK(check.non_finite == 1);
  CHECK(check.loss_scale == 4);
  CHECK(check.skipped_steps == 1);
  CHECK(after(std::nan(""), {}).non_finite == 1);
}

TEST_CASE("a dynamic loss scale grows after enough finite steps in a row and shrinks after one that is not",
          "[kernels][guard]") {
  GuardRule rule;
  rule.growth_interval = 3;
  rule.growth_factor = 4;
  rule.backoff_factor = 0.25f;
  GradientCheck check;
  check.loss_scale = 64;
  const bool finite[] = {true, true, false, true, true, true, true, true, true, false, false};
  const float expected[] = {64, 64, 16, 16, 16, 64, 64, 64, 256, 64, 16};
  for (size_t i = 0; i < std::size(finite); ++i) {
    const float used = check.loss_scale;
    check = after(finite[i] ? 64.0 * 64 : kNotFinite, rule, check);
    CHECK(check.loss_scale == expected[i]);
    // This step's gradients were made with the scale before it changed.
    if (finite[i]) CHECK(check.norm == 64 / static_cast<double>(used));
  }
  CHECK(check.skipped_steps == 3);
}

TEST_CASE("a dynamic loss scale neither vanishes nor overflows", "[kernels][guard]") {
  GuardRule rule;
  rule.growth_interval = 1;
  GradientCheck check;
  for (int i = 0; i < 300; ++i) check = after(kNotFinite, rule, check);
  CHECK(check.loss_scale == kSmallestLossScale);
  for (int i = 0; i < 300; ++i) check = after(1, rule, check);
  CHECK(check.loss_scale == kLargestLossScale);
  CHECK(std::isfinite(check.factor));
}

}  // namespace pacer::kernels::testing
