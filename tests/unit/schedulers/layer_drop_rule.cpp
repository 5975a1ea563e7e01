// The rules of progressive layer dropping: theta, the keep probabilities, the threshold and the draw behind a
// decision. Frequencies over a million draws are in tests/property/schedulers_rules.cpp.
#include <cmath>
#include <limits>

#include <pacer/core/error.h>
#include <pacer/schedulers/layer_drop.h>
#include <pacer/schedulers/layer_drop_rule.h>

#include "support/catch.h"
#include "support/schedulers/gate_progress.h"

namespace pacer::testing {
namespace {

using Catch::Approx;
using Catch::Matchers::ContainsSubstring;

}  // namespace

TEST_CASE("theta starts at 1 and has half its way behind it after log(2) / gamma steps",
          "[schedulers][layer_drop]") {
  const LayerDropOptions options = LayerDropOptions().theta_bar(0.5).gamma(std::log(2.0) / 100);
  CHECK(layer_drop_theta(options, gate_progress(0)) == 1.0);
  CHECK(layer_drop_theta(options, gate_progress(100)) == Approx(0.75).epsilon(1e-14));
  CHECK(layer_drop_theta(options, gate_progress(200)) == Approx(0.625).epsilon(1e-14));
  CHECK(layer_drop_theta(options, gate_progress(300)) == Approx(0.5625).epsilon(1e-14));
  CHECK(layer_drop_theta(options, gate_progress(std::numeric_limits<int64_t>::max())) == 0.5);
}

TEST_CASE("layer dropping defaults to theta_bar 0.5, a gamma of 0.001 and seed 0",
          "[schedulers][layer_drop]") {
  const LayerDropOptions options;
  CHECK(options.theta_bar() == 0.5);
  CHECK_FALSE(options.gamma().has_value());
  CHECK(options.seed() == 0);
  CHECK(layer_drop_theta(options, gate_progress(1'000)) ==
        Approx(0.5 + 0.5 / 2.718281828459045).epsilon(1e-14));
}

TEST_CASE("deeper layers are dropped more, the deepest with 1 - theta", "[schedulers][layer_drop]") {
  const LayerDropOptions options = LayerDropOptions().theta_bar(0.25).gamma(1e3);  // theta_bar from step 1 on
  const double expected[] = {0.8125, 0.625, 0.4375, 0.25};
  for (int64_t layer = 0; layer < 4; ++layer) {
    CHECK(keep_probability(options, layer, 4, gate_progress(0)) == 1.0);
    CHECK(keep_probability(options, layer, 4, gate_progress(1)) == expected[layer]);
  }
  CHECK(keep_probability(options, 0, 1, gate_progress(1)) == 0.25);
  CHECK(keep_probability(LayerDropOptions().gamma(0), 3, 4, gate_progress(1'000'000)) == 1.0);
  CHECK(keep_probability(LayerDropOptions().theta_bar(1), 3, 4, gate_progress(1'000'000)) == 1.0);
}

TEST_CASE("the threshold is the floor of 2^32 probabilities and beyond every draw at 1",
          "[schedulers][layer_drop]") {
  CHECK(keep_threshold(0.0) == 0);
  CHECK(keep_threshold(0x1p-33) == 0);
  CHECK(keep_threshold(0x1p-32) == 1);
  CHECK(keep_threshold(0.5) == 0x80000000u);
  CHECK(keep_threshold(1.0 / 3) == 0x55555555u);
  CHECK(keep_threshold(1 - 0x1p-53) == 0xFFFFFFFFu);
  CHECK(keep_threshold(1.0) == uint64_t{1} << 32);
}

TEST_CASE("the draw of a layer is Philox's published answer where the counter is zero",
          "[schedulers][layer_drop]") {
  CHECK(layer_drop_draw(0, 0, 0, 0) == 0x6627E8D5u);
  // The published answer for the digits of pi has 0x707344 in the 24 bits of the micro-step, but 3 in the
  // bits of the stream, which is not ours: the draws must differ.
  CHECK(layer_drop_draw(0x299F31D0A4093822u, 0x05A308D3243F6A88, 0x13198A2E, 0x707344) != 0xD16CFE09u);
}

TEST_CASE("every argument of a draw changes it", "[schedulers][layer_drop]") {
  const uint32_t draw = layer_drop_draw(1, 2, 3, 4);
  CHECK(layer_drop_draw(1, 2, 3, 4) == draw);
  CHECK(layer_drop_draw(2, 2, 3, 4) != draw);
  CHECK(layer_drop_draw(1 + (uint64_t{1} << 32), 2, 3, 4) != draw);
  CHECK(layer_drop_draw(1, 3, 3, 4) != draw);
  CHECK(layer_drop_draw(1, 2 + (int64_t{1} << 32), 3, 4) != draw);
  CHECK(layer_drop_draw(1, 2, 4, 4) != draw);
  CHECK(layer_drop_draw(1, 2, 3, 5) != draw);
  CHECK(layer_drop_draw(1, 2, 3 + (int64_t{1} << 32), 4) == draw);  // the counter has 32 bits for the step
}

TEST_CASE("a layer is kept where its draw is below the threshold", "[schedulers][layer_drop]") {
  // The draw at seed 0, layer 0, step 1 and the probability just above and just not above it.
  const uint32_t draw = layer_drop_draw(0, 0, 1, 0);
  const auto with_probability = [](double probability) {  // one layer: p = theta = theta_bar from step 1 on
    return LayerDropOptions().theta_bar(probability).gamma(1e3);
  };
  REQUIRE(draw > 0);
  CHECK(keeps_layer(with_probability((static_cast<double>(draw) + 1) * 0x1p-32), 0, 1, gate_progress(1)));
  CHECK_FALSE(keeps_layer(with_probability(static_cast<double>(draw) * 0x1p-32), 0, 1, gate_progress(1)));
}

TEST_CASE("layer dropping refuses what is out of range", "[schedulers][layer_drop]") {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const LayerDropOptions options;
  for (const double bad : {0.0, -0.5, 1.5, kNan, kInfinity}) {
    const auto wrong = LayerDropOptions().theta_bar(bad);
    CHECK_THROWS_WITH(LayerDropImpl(wrong), ContainsSubstring("theta_bar"));
    CHECK_THROWS_WITH(keeps_layer(wrong, 0, 1, gate_progress(0)), ContainsSubstring("theta_bar"));
  }
  for (const double bad : {-1.0, kNan, kInfinity}) {
    const auto wrong = LayerDropOptions().gamma(bad);
    CHECK_THROWS_WITH(LayerDropImpl(wrong), ContainsSubstring("gamma"));
    CHECK_THROWS_WITH(keeps_layer(wrong, 0, 1, gate_progress(0)), ContainsSubstring("gamma"));
  }
  CHECK_THROWS_AS(layer_drop_theta(options, gate_progress(-1)), InvalidArgument);
  CHECK_THROWS_WITH(keeps_layer(options, 4, 4, gate_progress(0)),
                    ContainsSubstring("layer 4 of a stack of 4"));
  CHECK_THROWS_AS(keep_probability(options, 0, 0, gate_progress(0)), InvalidArgument);
  CHECK_THROWS_AS(keep_probability(options, -1, 4, gate_progress(0)), InvalidArgument);
  CHECK_THROWS_AS(layer_drop_draw(0, -1, 0, 0), InvalidArgument);
  CHECK_THROWS_AS(layer_drop_draw(0, 0, -1, 0), InvalidArgument);
  CHECK_THROWS_AS(layer_drop_draw(0, 0, 0, -1), InvalidArgument);
  CHECK_NOTHROW(layer_drop_draw(0, 0, 0, (1 << 24) - 1));
  CHECK_THROWS_WITH(layer_drop_draw(0, 0, 0, 1 << 24), ContainsSubstring("2^24"));
  for (const double bad : {-0.1, 1.1, kNan}) CHECK_THROWS_AS(keep_threshold(bad), InvalidArgument);
}

}  // namespace pacer::testing
