// The elementary operations, bias corrections, and the step-dependent scalars of Adam, against long double.
#include <cmath>
#include <cstdint>
#include <limits>

#include <pacer/kernels/math/adam.h>

#include "support/catch.h"
#include "support/samples.h"

namespace pacer::kernels::testing {
namespace {

using pacer::testing::Samples;

// Distance of a value from the exact one, in units of 2^-53 of it.
double units_from(double value, long double exact) {
  return static_cast<double>(std::abs(value - exact) / std::abs(exact)) * 0x1p53;
}

RuleSettings usual_settings() {
  RuleSettings settings;
  settings.learning_rate = 0.003;
  settings.beta1 = 0.9;
  settings.beta2 = 0.999;
  settings.epsilon = 1e-8;
  settings.weight_decay = 0.1;
  settings.factor = 0.7;
  return settings;
}

}  // namespace

TEST_CASE("a fused multiplication and addition rounds once, separate ones twice", "[kernels][arithmetic]") {
  const float a = 1 + 0x1p-12f;
  CHECK(fma_(a, a, -(1 + 0x1p-11f)) == 0x1p-24f);
  CHECK(mul_(a, a) == 1 + 0x1p-11f);
  const double b = 1 + 0x1p-27;
  CHECK(fma_(b, b, -(1 + 0x1p-26)) == 0x1p-54);
  CHECK(mul_(b, b) == 1 + 0x1p-26);
}

TEST_CASE("division and square root are rounded to nearest", "[kernels][arithmetic]") {
  Samples samples(1);
  for (int i = 0; i < 20000; ++i) {
    const float a = static_cast<float>(samples.log_uniform(1e-30, 1e30));
    const float b = static_cast<float>(samples.log_uniform(1e-30, 1e30));
    // double carries more than twice the bits of float, so rounding twice is harmless here (Figueroa, 1995).
    REQUIRE(div_(a, b) == static_cast<float>(static_cast<double>(a) / b));
    REQUIRE(sqrt_(a) == static_cast<float>(std::sqrt(static_cast<double>(a))));
    const double quotient = div_(static_cast<double>(a), static_cast<double>(b));
    REQUIRE(units_from(quotient, static_cast<long double>(a) / b) <= 1.0);
    REQUIRE(units_from(sqrt_(static_cast<double>(a)), std::sqrt(static_cast<long double>(a))) <= 1.0);
  }
}

TEST_CASE("the bits of a float survive both ways", "[kernels][arithmetic]") {
  CHECK(bits_of(1.0f) == 0x3F800000u);
  CHECK(bits_of(-0.0f) == 0x80000000u);
  CHECK(float_of(0x00000001u) == std::numeric_limits<float>::denorm_min());
  CHECK(float_of(0x7F800000u) == std::numeric_limits<float>::infinity());
}

TEST_CASE("one minus a power is exact where it can be", "[kernels][arithmetic]") {
  CHECK(one_minus_power(0.9, 0) == 0.0);
  CHECK(one_minus_power(0.0, 0) == 0.0);
  CHECK(one_minus_power(0.0, 5) == 1.0);
  CHECK(one_minus_power(0.9, 1) == 1.0 - 0.9);
  CHECK(one_minus_power(0.9, std::numeric_limits<int64_t>::max()) == 1.0);
  for (int64_t k = 0; k <= 52; ++k)
    REQUIRE(one_minus_power(0.5, k) == 1.0 - std::ldexp(1.0, static_cast<int>(-k)));
  // (1 - 2^-30)^2 = 1 - 2^-29 + 2^-60: the last term is lost where the power itself is rounded to a double.
  CHECK(one_minus_power(1.0 - 0x1p-30, 2) == 0x1p-29 - 0x1p-60);
}

TEST_CASE("one minus a power is right to two units in the last place, also close to zero",
          "[kernels][arithmetic]") {
  Samples samples(2);
  double worst = 0;
  for (int i = 0; i < 200000; ++i) {
    const double distance = samples.log_uniform(1e-12, 1.0);
    const double base = 1.0 - distance;
    const int64_t exponent = static_cast<int64_t>(samples.log_uniform(1, 1e9));
    const long double exact =
        -std::expm1(static_cast<long double>(exponent) * std::log1p(static_cast<long double>(base) - 1.0L));
    worst = std::max(worst, units_from(one_minus_power(base, exponent), exact));
  }
  INFO("largest error in units of 2^-53: " << worst);
  CHECK(worst <= 2.0);
}

TEST_CASE("the scalars of Adam are rounded once from double", "[kernels][adam]") {
  const RuleSettings settings = usual_settings();
  const AdamScalars<float> s = adam_scalars<float>(settings, 3);
  CHECK(s.beta1 == 0.9f);
  CHECK(s.beta2 == 0.999f);
  CHECK(s.one_minus_beta1 == static_cast<float>(1.0 - 0.9));
  CHECK(s.one_minus_beta2 == static_cast<float>(1.0 - 0.999));
  CHECK(s.one_minus_beta2 != 1.0f - 0.999f);  // what rounding twice gives: wrong by 2e-5
  CHECK(s.epsilon == 1e-8f);
  CHECK(s.factor == 0.7f);
  CHECK(s.skip == 0);
  const AdamScalars<double> d = adam_scalars<double>(settings, 3);
  CHECK(d.one_minus_beta2 == 1.0 - 0.999);
  CHECK(d.epsilon == 1e-8);
}

TEST_CASE("the corrections of the bias follow the step", "[kernels][adam]") {
  const RuleSettings settings = usual_settings();
  for (const int64_t step : {1, 2, 3, 10, 1000, 1000000}) {
    const AdamScalars<double> s = adam_scalars<double>(settings, step);
    const long double t = static_cast<long double>(step);
    const long double c1 = -std::expm1(t * std::log(static_cast<long double>(settings.beta1)));
    const long double c2 = -std::expm1(t * std::log(static_cast<long double>(settings.beta2)));
    CHECK(units_from(s.step_size, settings.learning_rate / c1) <= 4);
    CHECK(units_from(s.inverse_sqrt_correction, 1 / std::sqrt(c2)) <= 4);
    CHECK(adam_scalars<float>(settings, step).step_size == static_cast<float>(s.step_size));
    CHECK(adam_scalars<float>(settings, step).inverse_sqrt_correction ==
          static_cast<float>(s.inverse_sqrt_correction));
    CHECK(s.step == step);
  }
}

TEST_CASE("without bias correction the step does not matter", "[kernels][adam]") {
  RuleSettings settings = usual_settings();
  settings.bias_correction = 0;
  for (const int64_t step : {1, 7, 1000}) {
    CHECK(adam_scalars<double>(settings, step).step_size == settings.learning_rate);
    CHECK(adam_scalars<double>(settings, step).inverse_sqrt_correction == 1.0);
  }
}

TEST_CASE("weight decay enters in one place only", "[kernels][adam]") {
  RuleSettings settings = usual_settings();
  settings.decay_mode = WeightDecay::none;
  CHECK(adam_scalars<double>(settings, 1).l2 == 0.0);
  CHECK(adam_scalars<double>(settings, 1).decay == 0.0);
  settings.decay_mode = WeightDecay::l2;
  CHECK(adam_scalars<double>(settings, 1).l2 == 0.1);
  CHECK(adam_scalars<double>(settings, 1).decay == 0.0);
  settings.decay_mode = WeightDecay::decoupled;
  CHECK(adam_scalars<double>(settings, 1).l2 == 0.0);
  CHECK(adam_scalars<double>(settings, 1).decay == 0.003 * 0.1);
  CHECK(adam_scalars<double>(settings, 1).decay_mode == WeightDecay::decoupled);
}

TEST_CASE("the seed of stochastic rounding reaches the scalars in full", "[kernels][adam]") {
  RuleSettings settings;
  settings.seed = 0xFEDCBA9876543210u;
  CHECK(adam_scalars<float>(settings, 1).seed == 0xFEDCBA9876543210u);
}

}  // namespace pacer::kernels::testing
