// The update rule in closed forms and known answers: what Adam and AdamW do where it can be said without
// restating the formulas. The error bound over random cases is in tests/property/adam_error_bound.cpp.
#include <cmath>
#include <cstdint>

#include <pacer/kernels/adam.h>

#include "support/catch.h"
#include "support/kernels/adam_arrays.h"

namespace pacer::kernels::testing {
namespace {

using Catch::Approx;

// The parameter, moments and gradient of one fp64 element, stepped by the kernel.
struct LoneElement {
  double parameter = 0, gradient = 0, exp_avg = 0, exp_avg_sq = 0, max_exp_avg_sq = 0;

  void step(const RuleSettings& settings, int64_t t, bool amsgrad = false) {
    AdamGroupScalars scalars;
    scalars.set(0, AdamStorage::f64, settings, t);
    const AdamTensor tensor{&parameter, &exp_avg, &exp_avg_sq, &max_exp_avg_sq, nullptr, 0};
    const AdamGradient only{&gradient, 0};
    adam_cpu({AdamStorage::f64, amsgrad}, Tile{0, 1, 0}, &tensor, &only, scalars.data());
  }
};

RuleSettings plain_settings(double learning_rate) {
  RuleSettings settings;
  settings.learning_rate = learning_rate;
  settings.epsilon = 0;
  return settings;
}

Approx near(double value) { return Approx(value).epsilon(1e-12).margin(1e-300); }

}  // namespace

TEST_CASE("the first step moves by the learning rate against the gradient's sign", "[kernels][adam]") {
  for (const double gradient : {1e-12, -1e-12, 0.3, -0.3, 1e12, -1e12}) {
    LoneElement e;
    e.parameter = 2;
    e.gradient = gradient;
    e.step(plain_settings(0.125), 1);
    CHECK(e.parameter == near(gradient > 0 ? 1.875 : 2.125));
  }
}

TEST_CASE("a constant gradient moves by the learning rate at every step", "[kernels][adam]") {
  // The corrected moments are then g and g^2, whatever the betas.
  for (const double beta1 : {0.0, 0.5, 0.9}) {
    for (const double beta2 : {0.0, 0.9, 0.999}) {
      RuleSettings settings = plain_settings(0.25);
      settings.beta1 = beta1;
      settings.beta2 = beta2;
      settings.epsilon = 0.6;
      LoneElement e;
      e.parameter = 7;
      e.gradient = -0.4;
      for (int64_t t = 1; t <= 20; ++t) e.step(settings, t);
      CHECK(e.parameter == near(7 + 20 * 0.25 * 0.4 / (0.4 + 0.6)));
    }
  }
}

TEST_CASE("the moments remember the gradient as geometric series", "[kernels][adam]") {
  RuleSettings settings = plain_settings(0.01);
  settings.beta1 = 0.75;
  settings.beta2 = 0.5;
  LoneElement e;
  e.gradient = 3;
  for (int64_t t = 1; t <= 10; ++t) e.step(settings, t);
  CHECK(e.exp_avg == near(3 * (1 - std::pow(0.75, 10))));
  CHECK(e.exp_avg_sq == near(9 * (1 - std::pow(0.5, 10))));
  e.gradient = 0;
  for (int64_t t = 11; t <= 14; ++t) e.step(settings, t);
  CHECK(e.exp_avg == near(3 * (1 - std::pow(0.75, 10)) * std::pow(0.75, 4)));
  CHECK(e.exp_avg_sq == near(9 * (1 - std::pow(0.5, 10)) * std::pow(0.5, 4)));
}

TEST_CASE("without bias correction the first step is as small as the moments", "[kernels][adam]") {
  RuleSettings settings = plain_settings(0.5);
  settings.bias_correction = 0;
  settings.beta1 = 0.75;
  settings.beta2 = 0.9375;
  LoneElement e;
  e.gradient = 4;
  e.step(settings, 1);  // m = g / 4, sqrt(v) = g / 4
  CHECK(e.parameter == near(-0.5));
  settings.beta2 = 0.9975;  // sqrt(v) = g / 20
  e = LoneElement();
  e.gradient = 4;
  e.step(settings, 1);
  CHECK(e.parameter == near(-2.5));
}

TEST_CASE("epsilon is added outside the square root and after the correction", "[kernels][adam]") {
  RuleSettings settings = plain_settings(1);
  settings.epsilon = 3;
  LoneElement e;
  e.gradient = 1;
  e.step(settings, 1);
  CHECK(e.parameter == near(-0.25));  // 1 / (1 + 3)
  settings.bias_correction = 0;
  settings.beta1 = 0;
  settings.beta2 = 0.75;
  e = LoneElement();
  e.gradient = 1;
  e.step(settings, 1);
  CHECK(e.parameter == near(-1 / 3.5));  // 1 / (sqrt(1/4) + 3)
}

TEST_CASE("decoupled decay shrinks the parameter and leaves the moments alone", "[kernels][adam]") {
  RuleSettings settings = plain_settings(0.1);
  settings.epsilon = 1;
  settings.weight_decay = 0.5;
  settings.decay_mode = WeightDecay::decoupled;
  LoneElement e;
  e.parameter = -8;
  for (int64_t t = 1; t <= 30; ++t) e.step(settings, t);
  CHECK(e.parameter == near(-8 * std::pow(0.95, 30)));
  CHECK(e.exp_avg == 0.0);
  CHECK(e.exp_avg_sq == 0.0);
}

TEST_CASE("decoupled decay and the update add up", "[kernels][adam]") {
  RuleSettings settings = plain_settings(0.25);
  settings.weight_decay = 0.5;
  settings.decay_mode = WeightDecay::decoupled;
  LoneElement e;
  e.parameter = 4;
  e.gradient = 1e-3;
  e.step(settings, 1);
  CHECK(e.parameter == near(4 - 0.25 * 0.5 * 4 - 0.25));
}

TEST_CASE("l2 decay is part of the gradient and of both moments", "[kernels][adam]") {
  RuleSettings settings = plain_settings(0.125);
  settings.beta1 = 0.75;
  settings.beta2 = 0.875;
  settings.weight_decay = 0.5;
  settings.decay_mode = WeightDecay::l2;
  LoneElement e;
  e.parameter = 8;
  e.gradient = -1;
  e.step(settings, 1);  // the gradient is -1 + 0.5 * 8 = 3
  CHECK(e.exp_avg == near(0.75));
  CHECK(e.exp_avg_sq == near(1.125));
  CHECK(e.parameter == near(7.875));
}

TEST_CASE("the factor scales the gradient and not the decay", "[kernels][adam]") {
  RuleSettings settings = plain_settings(0.125);
  settings.beta1 = 0.5;
  settings.factor = 0.25;
  settings.weight_decay = 0.5;
  settings.decay_mode = WeightDecay::l2;
  LoneElement e;
  e.parameter = 2;
  e.gradient = 40;
  e.step(settings, 1);  // 0.25 * 40 + 0.5 * 2 = 11
  CHECK(e.exp_avg == near(5.5));
}

TEST_CASE("amsgrad divides by the largest second moment so far", "[kernels][adam]") {
  RuleSettings settings = plain_settings(1);
  settings.bias_correction = 0;
  settings.beta1 = 0;
  settings.beta2 = 0;
  LoneElement e;
  e.gradient = 8;
  e.step(settings, 1, true);
  CHECK(e.parameter == near(-1));
  e.gradient = 2;
  e.step(settings, 2, true);
  CHECK(e.exp_avg_sq == near(4));
  CHECK(e.max_exp_avg_sq == near(64));
  CHECK(e.parameter == near(-1.25));  // 2 / 8
  e.gradient = -16;
  e.step(settings, 3, true);
  CHECK(e.max_exp_avg_sq == near(256));
  CHECK(e.parameter == near(-0.25));
}

TEST_CASE("zero gradients and zero state change nothing", "[kernels][adam]") {
  for (const bool amsgrad : {false, true}) {
    RuleSettings settings;
    LoneElement e;
    e.parameter = 3;
    for (int64_t t = 1; t <= 5; ++t) e.step(settings, t, amsgrad);
    CHECK(e.parameter == 3.0);
    CHECK(e.exp_avg_sq == 0.0);
  }
}

}  // namespace pacer::kernels::testing
