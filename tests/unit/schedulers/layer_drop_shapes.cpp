// The shapes of layer dropping in depth and in time, and which rows a gate by sample keeps: values written
// out by hand, and what is refused. The rule of progressive dropping is in layer_drop_rule.cpp.
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <pacer/core/error.h>
#include <pacer/schedulers/layer_drop.h>
#include <pacer/schedulers/layer_drop_rule.h>

#include "support/catch.h"
#include "support/schedulers/gate_progress.h"

namespace pacer::testing {
namespace {

using Catch::Approx;
using Catch::Matchers::ContainsSubstring;

// theta is theta_bar throughout.
LayerDropOptions steady(double theta_bar) {
  return LayerDropOptions().theta_bar(theta_bar).schedule(constant_schedule());
}

using Shares = std::vector<double>;

Shares shares_of(const LayerDropOptions& options, int64_t layers) {
  Shares shares;
  for (int64_t layer = 0; layer < layers; ++layer) shares.push_back(depth_share(options, layer, layers));
  return shares;
}

}  // namespace

TEST_CASE("every shape in depth has the shares that its formula says", "[schedulers][layer_drop]") {
  const auto of = [](DropDepth depth) { return LayerDropOptions().depth(depth); };
  CHECK(shares_of(LayerDropOptions(), 4) == Shares{0.25, 0.5, 0.75, 1});
  CHECK(shares_of(of(DropDepth::linear), 4) == Shares{0.25, 0.5, 0.75, 1});
  CHECK(shares_of(of(DropDepth::from_zero), 5) == Shares{0, 0.25, 0.5, 0.75, 1});
  CHECK(shares_of(of(DropDepth::uniform), 3) == Shares{1, 1, 1});
  // 2^(1/3) and 2^(2/3), the cube roots of 2 and of 4.
  const Shares exponential = shares_of(of(DropDepth::exponential), 4);
  CHECK(exponential[0] == 0);
  CHECK(exponential[1] == Approx(0.259921049894873164767).epsilon(1e-14));
  CHECK(exponential[2] == Approx(0.587401051968199474752).epsilon(1e-14));
  CHECK(exponential[3] == 1);
  for (const auto& [depth, share] : {std::pair{DropDepth::linear, 1.0},
                                     {DropDepth::from_zero, 0.0},
                                     {DropDepth::uniform, 1.0},
                                     {DropDepth::exponential, 0.0}}) {
    CHECK(shares_of(of(depth), 1) == Shares{share});
  }
  CHECK(shares_of(LayerDropOptions().last_layers(2), 5) == Shares{0, 0, 0, 1, 1});
  CHECK(shares_of(LayerDropOptions().last_layers(3), 3) == Shares{1, 1, 1});
  CHECK(shares_of(LayerDropOptions().shares(Shares{0.5, 0, 1}), 3) == Shares{0.5, 0, 1});
}

TEST_CASE("a layer is dropped with its share of 1 - theta", "[schedulers][layer_drop]") {
  const LayerDropOptions options = steady(0.25).shares(Shares{0, 0.5, 1});
  const double expected[] = {1, 0.625, 0.25};
  for (int64_t layer = 0; layer < 3; ++layer) {
    CHECK(keep_probability(options, layer, 3, gate_progress(7)) == expected[layer]);
  }
  CHECK(keep_probability(steady(0.25).last_layers(1), 1, 3, gate_progress(0)) == 1);
  CHECK(keep_probability(steady(0.25).last_layers(1), 2, 3, gate_progress(0)) == 0.25);
}

TEST_CASE("theta follows a schedule by steps or by tokens", "[schedulers][layer_drop]") {
  const auto theta = [](const LearningRateSchedule& schedule, int64_t step, int64_t tokens = 0) {
    const LayerDropOptions options = LayerDropOptions().theta_bar(0.5).schedule(schedule);
    return layer_drop_theta(options, gate_progress(step, 0, tokens));
  };
  for (const int64_t step : {0, 1, 1'000'000}) CHECK(theta(constant_schedule(), step) == 0.5);

  const auto falling = warmup_linear({0, 100});
  CHECK(theta(falling, 0) == 0.5);
  CHECK(theta(falling, 25) == 0.625);
  CHECK(theta(falling, 100) == 1);
  CHECK(theta(falling, 1'000) == 1);

  const auto by_tokens = warmup_linear(LearningRateScheduleOptions().total_tokens(4'000));
  CHECK(theta(by_tokens, 9, 0) == 0.5);
  CHECK(theta(by_tokens, 9, 1'000) == 0.625);
  CHECK(theta(by_tokens, 9, 4'000) == 1);

  // At step q the warm-up of 4 steps has arrived at (q + 1) / 4.
  const auto rising = constant_schedule({4});
  CHECK(theta(rising, 0) == 0.875);
  CHECK(theta(rising, 1) == 0.75);
  CHECK(theta(rising, 3) == 0.5);
  CHECK(theta(rising, 9) == 0.5);

  const auto up_down = warmup_linear({4, 8});
  CHECK(theta(up_down, 1) == 0.75);
  CHECK(theta(up_down, 3) == 0.5);
  CHECK(theta(up_down, 6) == 0.75);
  CHECK(theta(up_down, 8) == 1);
}

TEST_CASE("layers of every shape are dropped as often as they should be", "[schedulers][layer_drop]") {
  constexpr int64_t kLayers = 6, kSteps = 20'000;
  for (const DropDepth depth :
       {DropDepth::linear, DropDepth::from_zero, DropDepth::uniform, DropDepth::exponential}) {
    const LayerDropOptions options = steady(0.4).depth(depth).seed(3);
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      CAPTURE(static_cast<int>(depth), layer);
      const double i = static_cast<double>(layer), below = i / 5;
      const double share = depth == DropDepth::linear      ? (i + 1) / 6
                           : depth == DropDepth::from_zero ? below
                           : depth == DropDepth::uniform   ? 1
                                                           : std::exp(below * std::log(2.0)) - 1;
      const double p = 1 - 0.6 * share;
      int64_t kept = 0, kept_rows = 0;
      for (int64_t step = 0; step < kSteps; ++step) {
        kept += keeps_layer(options, layer, kLayers, gate_progress(step));
        kept_rows += keeps_rows(options, layer, kLayers, gate_progress(step), 0, 3)[2];
      }
      const double bound = 4 * std::sqrt(p * (1 - p) * kSteps);
      CHECK(std::abs(static_cast<double>(kept) - p * kSteps) <= bound);
      CHECK(std::abs(static_cast<double>(kept_rows) - p * kSteps) <= bound);
    }
  }
}

TEST_CASE("the draw of a row is Philox's at the layer, rank and row", "[schedulers][layer_drop]") {
  // From Philox written out in Python, with the counter {index low, index high, step, 0x04000000 + micro-step}
  // and the index 2^48 layer + 2^28 rank + floor(row / 4).
  const uint32_t first[] = {0xB820CD9Cu, 0x78FC2AA8u, 0x6438F5B7u, 0x7C871F8Fu, 0x1089C858u};
  for (int64_t row = 0; row < 5; ++row) CHECK(row_drop_draw(0, 0, 0, 0, 0, row) == first[row]);
  CHECK(row_drop_draw(7, 3, 11, 2, 5, 9) == 0x545FF292u);
  CHECK(row_drop_draw((uint64_t{1} << 40) + 1, 65535, 0xFFFFFFFF, (1 << 24) - 1, (1 << 20) - 1,
                      (1 << 30) - 1) == 0x4F828C9Au);
  const std::vector<bool> kept = {true, false, false, false, true,  true,
                                  true, false, false, false, false, false};
  CHECK(keeps_rows(steady(0.5).depth(DropDepth::uniform).seed(7), 1, 3, gate_progress(3, 1), 2, 12) == kept);
  CHECK(keeps_rows(steady(0.5), 1, 3, gate_progress(3, 1), 2, 0).empty());
}

TEST_CASE("rows of one seed are dropped independently of rows, layers, steps, micro-steps and ranks",
          "[schedulers][layer_drop]") {
  constexpr int64_t kSteps = 1'000, kRows = 50;
  const LayerDropOptions options = steady(0.5).depth(DropDepth::uniform).seed(12);
  const auto rows = [&](int64_t layer, int64_t step, int64_t micro_step, int64_t rank) {
    return keeps_rows(options, layer, 9, gate_progress(step, micro_step), rank, kRows + 1);
  };
  int64_t kept = 0, by_row = 0, by_layer = 0, by_step = 0, by_micro_step = 0, by_rank = 0, whole = 0;
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto here = rows(2, step, 0, 0), layer = rows(3, step, 0, 0), next = rows(2, step + 1, 0, 0),
               micro = rows(2, step, 1, 0), rank = rows(2, step, 0, 1);
    const bool layer_kept = keeps_layer(options, 2, 9, gate_progress(step));
    for (size_t r = 0; r < kRows; ++r) {
      kept += here[r];
      by_row += here[r] == here[r + 1];
      by_layer += here[r] == layer[r];
      by_step += here[r] == next[r];
      by_micro_step += here[r] == micro[r];
      by_rank += here[r] == rank[r];
    }
    whole += here[0] == layer_kept;  // the decision without per_sample
  }
  constexpr double kCoins = kSteps * kRows;
  for (const int64_t count : {kept, by_row, by_layer, by_step, by_micro_step, by_rank}) {
    CHECK(std::abs(static_cast<double>(count) - kCoins / 2) < 4 * std::sqrt(kCoins / 4));
  }
  CHECK(std::abs(static_cast<double>(whole) - kSteps / 2.0) < 4 * std::sqrt(kSteps / 4.0));
}

TEST_CASE("shapes of layer dropping refuse what is out of range or without effect",
          "[schedulers][layer_drop]") {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const auto refused = [](const LayerDropOptions& options, const std::string& words) {
    CAPTURE(words);
    CHECK_THROWS_WITH(LayerDropImpl(options), ContainsSubstring(words));
    CHECK_THROWS_WITH(layer_drop_theta(options, gate_progress(0)), ContainsSubstring(words));
    CHECK_THROWS_WITH(keeps_layer(options, 0, 2, gate_progress(0)), ContainsSubstring(words));
    CHECK_THROWS_WITH(keeps_rows(options, 0, 2, gate_progress(0), 0, 1), ContainsSubstring(words));
  };
  const LayerDropOptions options;
  refused(steady(0.5).gamma(0.1), "gamma and schedule; give the one that theta shall follow");
  const std::string one = "more than one of depth, last_layers and shares";
  refused(LayerDropOptions().depth(DropDepth::linear).last_layers(1), one);
  refused(LayerDropOptions().depth(DropDepth::uniform).shares(Shares{1, 1}), one);
  refused(LayerDropOptions().last_layers(1).shares(Shares{1, 1}), one);
  for (const int64_t bad : {0, -1}) {
    refused(LayerDropOptions().last_layers(bad), "last_layers of layer dropping must be at least 1");
  }
  for (const double bad : {-0.1, 1.1, kNan}) {
    refused(LayerDropOptions().shares(Shares{1, bad}), "shares of layer dropping must be in [0, 1]");
  }
  CHECK_THROWS_WITH(depth_share(LayerDropOptions().depth(static_cast<DropDepth>(9)), 0, 2),
                    ContainsSubstring("does not exist"));

  // What depends on the stack is refused where that is known.
  CHECK_THROWS_WITH(depth_share(LayerDropOptions().last_layers(3), 0, 2),
                    ContainsSubstring("last_layers of layer dropping is 3, but the stack has 2 layers"));
  CHECK_THROWS_WITH(depth_share(LayerDropOptions().shares(Shares{1}), 0, 2),
                    ContainsSubstring("has 1 numbers, but the stack has 2 layers; give one for each layer"));
  for (const Shares& shares : {Shares{}, Shares{0, 0.5, 1}}) {
    CHECK_THROWS_AS(depth_share(LayerDropOptions().shares(shares), 0, 2), InvalidArgument);
  }
  CHECK_THROWS_AS(layer_drop_theta(steady(0.5), gate_progress(0, 0, -1)), InvalidArgument);

  CHECK_NOTHROW(row_drop_draw(0, 65535, 0, (1 << 24) - 1, (1 << 20) - 1, (1 << 30) - 1));
  CHECK_THROWS_WITH(row_drop_draw(0, 65536, 0, 0, 0, 0), ContainsSubstring("layer 65536"));
  CHECK_THROWS_WITH(row_drop_draw(0, 0, 0, 0, 1 << 20, 0), ContainsSubstring("rank 1048576"));
  CHECK_THROWS_WITH(row_drop_draw(0, 0, 0, 0, -1, 0), ContainsSubstring("rank -1"));
  CHECK_THROWS_WITH(row_drop_draw(0, 0, 0, 0, 0, 1 << 30), ContainsSubstring("row 1073741824"));
  CHECK_THROWS_WITH(row_drop_draw(0, 0, 0, 0, 0, -1), ContainsSubstring("row -1"));
  CHECK_THROWS_WITH(row_drop_draw(0, 0, 0, 1 << 24, 0, 0), ContainsSubstring("2^24"));
  CHECK_THROWS_AS(row_drop_draw(0, -1, 0, 0, 0, 0), InvalidArgument);
  CHECK_THROWS_AS(row_drop_draw(0, 0, -1, 0, 0, 0), InvalidArgument);
  CHECK_THROWS_WITH(keeps_rows(options, 0, 2, gate_progress(0), 0, -1), ContainsSubstring("-1 rows"));
  CHECK_THROWS_WITH(keeps_rows(options, 0, 2, gate_progress(0), 0, (int64_t{1} << 30) + 1),
                    ContainsSubstring("2^30"));
}

}  // namespace pacer::testing
