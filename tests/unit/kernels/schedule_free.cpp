// The rule of Schedule-Free AdamW, against the values that the package schedulefree 1.4.1 has after 200 steps in
// fp64 (schedule_free_values.py prints them).
#include <pacer/kernels/math/schedule_free.h>

#include <array>
#include <cmath>
#include <cstdint>

#include "support/catch.h"

namespace pacer::kernels::testing::schedule_free {
namespace {

constexpr int64_t kSteps = 200;
using Four = std::array<double, 4>;

struct Run {
  AveragingRule rule;
  double weight_decay, beta1;
  bool rate_moves;
  Four y, z, x;  // at the end
  double weight_sum, lr_max;
};

const std::array<Run, 3> kRuns = {{
    {{0, 0.0, 2.0},
     0.0,
     0.9,
     false,
     {0.5077516115336915, -1.2439919456625665, 2.0064575237373736, -0.1220441919385539},
     {0.519974492392053, -1.2447212607110618, 2.014693174523895, -0.1314697174872399},
     {0.5063935136605403, -1.2439109106571782, 2.00554245142776, -0.12099691132203323},
     0.048828125,
     0.015625},
    {{10, 1.5, 2.0},
     0.125,
     0.9,
     true,
     {0.357603143359085, -0.8512017450284962, 1.39417820211373, -0.08783665686197546},
     {0.3072465574354146, -0.7412087995124096, 1.2236448648489813, -0.08901216792181778},
     {0.36319831957282617, -0.8634231834191725, 1.413126350698702, -0.08770604452199299},
     125.03168302055525,
     0.0234375},
    {{7, 0.25, 0.5},
     0.25,
     0.75,
     true,
     {0.25885147110083007, -0.6186966435627738, 1.015957266964856, -0.06288617400198435},
     {0.15292621823973643, -0.3692365312999807, 0.6212257242517778, -0.04854723023058383},
     {0.2941598887211946, -0.7018500143170381, 1.1475344478692153, -0.06766582192578452},
     91.90337640364157,
     0.0234375},
}};

template <class Real>
struct Trained {
  std::array<AdamElement<Real>, 4> elements{};
  AverageWeights average;
};

template <class Real>
Trained<Real> train(const Run& run) {
  RuleSettings settings;
  settings.beta1 = run.beta1;
  settings.beta2 = 0.96875;
  settings.epsilon = 0x1p-20;
  settings.weight_decay = run.weight_decay;
  settings.averaging = run.rule;
  Trained<Real> trained;
  const std::array<Real, 4> start = {Real(0.5), Real(-1.25), Real(2), Real(-0.125)};
  for (size_t i = 0; i < 4; ++i) {
    trained.elements[i].parameter = start[i];
    trained.elements[i].exp_avg = 77;  // the first step does not read it
  }
  for (int64_t t = 0; t < kSteps; ++t) {
    settings.learning_rate = 0x1p-6 * (run.rate_moves ? 1 + static_cast<double>(t % 3) / 4 : 1);
    const auto scalars = schedule_free_scalars<Real>(settings, t + 1, trained.average);
    for (size_t i = 0; i < 4; ++i) {
      trained.elements[i].gradient =
          static_cast<Real>((t * 7 + static_cast<int64_t>(i) * 3) % 11 - 5) / Real(8);
      ScheduleFreeRule::step(trained.elements[i], scalars);
    }
  }
  return trained;
}

// Of fp64: 200 steps whose rounding errors add up; of fp32 the same, at its precision.
template <class Real>
constexpr double kBound = sizeof(Real) == 8 ? 2e-14 : 2e-5;

template <class Real>
void check_run(const Run& run) {
  const Trained<Real> trained = train<Real>(run);
  for (size_t i = 0; i < 4; ++i) {
    const double y = trained.elements[i].parameter, z = trained.elements[i].exp_avg;
    CHECK(std::abs(y - run.y[i]) < kBound<Real>);
    CHECK(std::abs(z - run.z[i]) < kBound<Real>);
    CHECK(std::abs(y + (1 - 1 / run.beta1) * (z - y) - run.x[i]) < 2 * kBound<Real>);
  }
  CHECK(std::abs(trained.average.weight_sum / run.weight_sum - 1) < 1e-14);
  CHECK(trained.average.lr_max == run.lr_max);
}

}  // namespace

TEST_CASE("200 steps of Schedule-Free AdamW end where those of schedulefree do", "[kernels][schedule-free]") {
  for (const Run& run : kRuns) {
    check_run<double>(run);
    check_run<float>(run);
  }
}

TEST_CASE("a power is that of the C library to 2^-44, and whole powers of whole numbers are exact",
          "[kernels][schedule-free]") {
  for (const double base : {1e-9, 0.0025, 0.3, 1.0, 7.0, 1e6}) {
    for (const double exponent : {0.0, 0.25, 0.5, 0.7, 1.0, 1.5, 2.0, 3.1415, 9.999}) {
      CAPTURE(base, exponent);
      const long double exact = std::pow(static_cast<long double>(base), static_cast<long double>(exponent));
      CHECK(std::abs(power_of(base, exponent) / exact - 1) < 0x1p-44L);
    }
  }
  CHECK(power_of(7, 5) == 16807);
  CHECK(power_of(0, 0) == 1);
  CHECK(power_of(0, 1.5) == 0);
}

TEST_CASE("as long as all rates were 0 nothing counts in the average, and a lower rate keeps the largest",
          "[kernels][schedule-free]") {
  AverageWeights average;
  const AveragingRule rule;
  CHECK(take_into_average(0, rule, 1, average) == 0);
  CHECK(average.weight_sum == 0);
  CHECK(take_into_average(0.5, rule, 2, average) == 1);
  CHECK(take_into_average(0.25, rule, 3, average) == 0.5);
  CHECK(average.lr_max == 0.5);
  CHECK(average.weight_sum == 0.5);
}

TEST_CASE("the rate rises linearly and is whole in the last step of the warm-up",
          "[kernels][schedule-free]") {
  AveragingRule rule;
  CHECK(warmed_up_rate(0.5, rule, 1) == 0.5);
  rule.warmup_steps = 4;
  CHECK(warmed_up_rate(0.5, rule, 1) == 0.125);
  CHECK(warmed_up_rate(0.5, rule, 4) == 0.5);
  CHECK(warmed_up_rate(0.5, rule, 5) == 0.5);
}

}  // namespace pacer::kernels::testing::schedule_free
