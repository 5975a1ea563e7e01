// Learning-rate schedules against values computed by hand, against a restatement in long double, and what
// they refuse. Bounds over random configurations are in tests/property/schedulers_rules.cpp.
#include <cmath>
#include <limits>
#include <set>
#include <string>

#include <pacer/core/error.h>
#include <pacer/schedulers/learning_rate_schedule.h>

#include "support/catch.h"
#include "support/samples.h"

namespace pacer::testing {
namespace {

using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
using RateOptions = LearningRateScheduleOptions;

Progress rate_progress(int64_t step, int64_t tokens = 0) {
  Progress progress;
  progress.step = step;
  progress.tokens = tokens;
  return progress;
}

double factor_at(const LearningRateSchedule& schedule, int64_t step, int64_t tokens = 0) {
  return schedule.factor(rate_progress(step, tokens));
}

// An equality that forgives the last digits of a double.
Approx close_to(double value) { return Approx(value).epsilon(1e-14).margin(1e-15); }

// Two rules said in another way, in long double.
long double cosine_by_half_angle(long double share) {
  const long double half = std::cos(std::acos(-1.0L) * share / 2);
  return half * half;  // (1 + cos a) / 2 = cos^2 (a / 2)
}
long double decays_one_by_one(int64_t steps, long double gamma, int64_t every) {
  long double value = 1;
  for (int64_t step = 1; step <= steps; ++step) {
    if (step % every == 0) value *= gamma;
  }
  return value;
}

}  // namespace

TEST_CASE("a cosine schedule is built in place and goes through its known points", "[schedulers][rate]") {
  const LearningRateSchedule schedule = warmup_cosine({1'000, 100'000});
  CHECK(factor_at(schedule, 0) == close_to(0.001));
  CHECK(factor_at(schedule, 499) == close_to(0.5));
  CHECK(factor_at(schedule, 999) == 1.0);
  CHECK(factor_at(schedule, 1'000) == 1.0);
  CHECK(factor_at(schedule, 1'000 + 33'000) == close_to(0.75));
  CHECK(factor_at(schedule, 1'000 + 49'500) == close_to(0.5));
  CHECK(factor_at(schedule, 1'000 + 66'000) == close_to(0.25));
  CHECK(factor_at(schedule, 100'000) == 0.0);
  CHECK(factor_at(schedule, std::numeric_limits<int64_t>::max()) == 0.0);
}

TEST_CASE("a linear schedule takes equal steps up and down", "[schedulers][rate]") {
  const LearningRateSchedule schedule = warmup_linear(RateOptions(4, 12).start_factor(0.2).end_factor(0.1));
  const double expected[] = {0.4,    0.6,  0.8,    1.0,   1.0,    0.8875, 0.775,
                             0.6625, 0.55, 0.4375, 0.325, 0.2125, 0.1,    0.1};
  for (int64_t step = 0; step < 14; ++step) CHECK(factor_at(schedule, step) == close_to(expected[step]));
}

TEST_CASE("a polynomial of power 1 is linear", "[schedulers][rate]") {
  const RateOptions options = RateOptions(10, 1'000).end_factor(0.25);
  const LearningRateSchedule linear = warmup_linear(options), polynomial = warmup_polynomial(options);
  for (int64_t step = 0; step < 1'100; ++step) {
    REQUIRE(factor_at(polynomial, step) == close_to(factor_at(linear, step)));
  }
  CHECK(factor_at(warmup_polynomial(RateOptions(0, 100).power(2)), 50) == close_to(0.25));
  CHECK(factor_at(warmup_polynomial(RateOptions(0, 100).power(0.5)), 75) == close_to(0.5));
}

TEST_CASE("an exponential schedule decays once every so many steps", "[schedulers][rate]") {
  const LearningRateSchedule schedule = warmup_exponential(RateOptions(5).gamma(0.5).every(10));
  CHECK(factor_at(schedule, 3) == close_to(0.8));
  for (const int64_t step : {4, 5, 14}) CHECK(factor_at(schedule, step) == 1.0);
  for (const int64_t step : {15, 24}) CHECK(factor_at(schedule, step) == 0.5);
  CHECK(factor_at(schedule, 25) == 0.25);
  CHECK(factor_at(schedule, std::numeric_limits<int64_t>::max()) == 0.0);
}

TEST_CASE("an inverse square root schedule halves where the steps are four-fold", "[schedulers][rate]") {
  const LearningRateSchedule schedule = warmup_inverse_sqrt({100});
  CHECK(factor_at(schedule, 49) == close_to(0.5));
  CHECK(factor_at(schedule, 99) == 1.0);
  CHECK(factor_at(schedule, 399) == close_to(0.5));
  CHECK(factor_at(schedule, 1'599) == close_to(0.25));
  const LearningRateSchedule without_warmup = warmup_inverse_sqrt({});
  CHECK(factor_at(without_warmup, 0) == 1.0);
  CHECK(factor_at(without_warmup, 3) == close_to(0.5));
}

TEST_CASE("a constant schedule is warm-up and nothing else", "[schedulers][rate]") {
  CHECK(factor_at(constant_schedule(), 0) == 1.0);
  CHECK(factor_at(constant_schedule({4}), 1) == 0.5);
  CHECK(factor_at(constant_schedule({4}), 1'000'000) == 1.0);
}

TEST_CASE("a logarithmic warm-up rises by equal parts when 1 + k doubles", "[schedulers][rate]") {
  const LearningRateSchedule schedule =
      constant_schedule(RateOptions(7).warm_up(WarmUp::logarithmic).start_factor(0.1));
  CHECK(factor_at(schedule, 0) == close_to(0.4));
  CHECK(factor_at(schedule, 2) == close_to(0.7));
  CHECK(factor_at(schedule, 6) == 1.0);
}

TEST_CASE("the end of the warm-up is exactly the peak and nothing jumps there", "[schedulers][rate]") {
  Samples samples(3);
  for (int i = 0; i < 300; ++i) {
    const int64_t w = 100'000 + samples.below(1'000'000), total = 2 * w + samples.below(1'000'000);
    const auto options = [&] {
      RateOptions some(w);
      return some.start_factor(samples.uniform())
          .warm_up(samples.chance(0.5) ? WarmUp::linear : WarmUp::logarithmic);
    };
    for (const LearningRateSchedule& schedule :
         {constant_schedule(options()), warmup_linear(options().total_steps(total)),
          warmup_cosine(options().total_steps(total)),
          warmup_polynomial(options().total_steps(total).power(3)),
          warmup_exponential(options().gamma(0.99999)), warmup_inverse_sqrt(options())}) {
      REQUIRE(factor_at(schedule, w - 1) == 1.0);
      REQUIRE(std::abs(factor_at(schedule, w - 2) - 1) < 1e-4);
      REQUIRE(std::abs(factor_at(schedule, w) - 1) < 1e-4);
    }
  }
}

TEST_CASE("a total includes the warm-up", "[schedulers][rate]") {
  const LearningRateSchedule schedule = warmup_cosine(RateOptions(10, 10).end_factor(0.125));
  CHECK(factor_at(schedule, 4) == close_to(0.5));
  CHECK(factor_at(schedule, 9) == 1.0);
  CHECK(factor_at(schedule, 10) == 0.125);
  for (const int64_t total : {0, 1, 9}) {
    CHECK_THROWS_WITH(warmup_cosine(RateOptions(10, total)), ContainsSubstring("the warm-up takes 10 steps"));
  }
  CHECK(warmup_cosine({3, 20}).steps_until_zero() == 20);
  CHECK(warmup_cosine(RateOptions(3, 20).end_factor(0.1)).steps_until_zero() == std::nullopt);
  CHECK(warmup_linear(RateOptions(3).total_tokens(20)).steps_until_zero() == std::nullopt);
  CHECK(constant_schedule().steps_until_zero() == std::nullopt);
}

TEST_CASE("by tokens the warm-up by steps multiplies the decay by tokens", "[schedulers][rate]") {
  const LearningRateSchedule schedule = warmup_linear(RateOptions(4).total_tokens(1'000));
  CHECK(schedule.by_tokens());
  CHECK_FALSE(warmup_linear({4, 1'000}).by_tokens());
  CHECK(factor_at(schedule, 1, 0) == close_to(0.5));
  CHECK(factor_at(schedule, 1, 200) == close_to(0.4));
  CHECK(factor_at(schedule, 4, 0) == 1.0);
  CHECK(factor_at(schedule, 4, 200) == close_to(0.8));
  CHECK(factor_at(schedule, 1'000'000, 200) == close_to(0.8));
  CHECK(factor_at(schedule, 4, 1'000) == 0.0);
  CHECK(factor_at(schedule, 4, std::numeric_limits<int64_t>::max()) == 0.0);
  const LearningRateSchedule nothing_left = warmup_cosine(RateOptions(4).total_tokens(0).end_factor(0.5));
  CHECK(factor_at(nothing_left, 1) == close_to(0.25));
  CHECK(factor_at(nothing_left, 4) == 0.5);
}

TEST_CASE("schedules agree with a restatement in long double", "[schedulers][rate]") {
  Samples samples(4);
  for (int i = 0; i < 5'000; ++i) {
    const int64_t w = samples.below(50), total = w + 1 + samples.below(1'000), every = 1 + samples.below(20);
    const int64_t step = samples.below(1'200);
    const long double end = samples.uniform(), start = samples.uniform(), gamma = 0.5 + samples.uniform() / 2;
    const long double power = 0.5 + samples.uniform() * 3;
    const auto options = [&] { return RateOptions(w).start_factor(static_cast<double>(start)); };
    const auto ending = [&] { return options().total_steps(total).end_factor(static_cast<double>(end)); };
    const auto check = [&](const LearningRateSchedule& schedule, long double decayed) {
      // Interpolation as a weighted mean.
      const long double up = (static_cast<long double>(step) + 1) / (w == 0 ? 1 : w);
      const long double expected = step < w ? start * (1 - up) + up : decayed;
      CAPTURE(i, w, total, step);
      REQUIRE(std::abs(factor_at(schedule, step) - static_cast<double>(expected)) < 1e-14);
    };
    const int64_t left = total > step ? total - step : 0;
    const long double share_left = static_cast<long double>(left) / (total - w);
    const auto mean = [&](long double weight) { return end * (1 - weight) + weight; };
    check(warmup_linear(ending()), mean(share_left));
    check(warmup_cosine(ending()), mean(cosine_by_half_angle(1 - share_left)));
    const long double bent = left == 0 ? 0 : std::exp(power * std::log(share_left));
    check(warmup_polynomial(ending().power(static_cast<double>(power))), mean(bent));
    check(warmup_exponential(options().gamma(static_cast<double>(gamma)).every(every)),
          decays_one_by_one(step - w, gamma, every));
    const long double root = std::exp(std::log((w == 0 ? 1.0L : w) / (step + 1)) / 2);
    check(warmup_inverse_sqrt(options()), root);
  }
}

TEST_CASE("a stable schedule stays at the peak until its decay begins", "[schedulers][rate]") {
  const auto line = warmup_stable_decay(RateOptions(10, 100).decay_steps(20).end_factor(0.5));
  CHECK(factor_at(line, 4) == close_to(0.5));
  for (const int64_t step : {9, 10, 50, 80}) CHECK(factor_at(line, step) == 1.0);
  CHECK(factor_at(line, 85) == close_to(0.875));
  CHECK(factor_at(line, 99) == close_to(0.525));
  for (const int64_t step : {100, 1'000}) CHECK(factor_at(line, step) == 0.5);
  CHECK(line.steps_until_zero() == std::nullopt);

  // A quarter of the decay is over. Megatron-LM's exponential and minus_sqrt, and powers by hand.
  const RateOptions options = RateOptions(0, 100).decay_steps(20);
  const auto at_a_quarter = [](const LearningRateSchedule& schedule) { return factor_at(schedule, 85); };
  CHECK(at_a_quarter(warmup_stable_decay(options, Decay::minus_sqrt)) == close_to(0.5));
  CHECK(at_a_quarter(warmup_stable_decay(options, Decay::halving)) ==
        close_to(0.6817928305074290861));  // 2^(3/4) - 1
  CHECK(at_a_quarter(warmup_stable_decay(options, Decay::cosine)) == close_to(0.85355339059327376220));
  CHECK(at_a_quarter(warmup_stable_decay(RateOptions(options).power(2), Decay::polynomial)) ==
        close_to(0.5625));
  for (const Decay decay :
       {Decay::linear, Decay::cosine, Decay::polynomial, Decay::minus_sqrt, Decay::halving}) {
    const auto schedule = warmup_stable_decay(options, decay);
    CHECK(factor_at(schedule, 80) == 1.0);
    CHECK(factor_at(schedule, 100) == 0.0);
    CHECK(schedule.steps_until_zero() == 100);
    // All of it decays: the schedule without a stable part.
    CHECK(factor_at(LearningRateSchedule(decay, RateOptions(0, 100).decay_steps(100)), 30) ==
          factor_at(LearningRateSchedule(decay, {0, 100}), 30));
  }
  CHECK(factor_at(warmup_stable_decay(RateOptions(0, 100).decay_steps(0)), 99) == 1.0);
  CHECK(factor_at(warmup_stable_decay(RateOptions(0, 100).decay_steps(0)), 100) == 0.0);

  const auto tokens = warmup_stable_decay(RateOptions(4).total_tokens(1'000).decay_tokens(100));
  CHECK(factor_at(tokens, 1, 950) == close_to(0.25));
  CHECK(factor_at(tokens, 4, 900) == 1.0);
  CHECK(factor_at(tokens, 4, 950) == close_to(0.5));
  CHECK(factor_at(tokens, 4, 1'000) == 0.0);
}

TEST_CASE("a cosine with restarts begins again at the peak, in cycles that may grow", "[schedulers][rate]") {
  const auto equal = warmup_cosine_restarts(RateOptions(2).cycle_steps(4).end_factor(0.5));
  for (const int64_t step : {1, 2, 6, 10, 4'000'002}) CHECK(factor_at(equal, step) == 1.0);
  for (const int64_t step : {4, 8, 12}) CHECK(factor_at(equal, step) == close_to(0.75));
  const auto growing = warmup_cosine_restarts(RateOptions(0).cycle_steps(4).cycle_growth(3));
  for (const int64_t step : {0, 4, 16, 52, 160}) CHECK(factor_at(growing, step) == 1.0);
  for (const int64_t step : {2, 10, 34, 106}) CHECK(factor_at(growing, step) == close_to(0.5));
  CHECK(growing.steps_until_zero() == std::nullopt);
  constexpr int64_t kLast = std::numeric_limits<int64_t>::max();
  CHECK(factor_at(warmup_cosine_restarts(RateOptions(0).cycle_steps(2).cycle_growth(kLast)), kLast) < 1e-15);
}

TEST_CASE("one cycle goes up to the peak in its warm-up and down in all other steps", "[schedulers][rate]") {
  const LearningRateSchedule cosine = one_cycle({5, 15});
  CHECK(factor_at(cosine, 0) == 0.04);
  CHECK(factor_at(cosine, 1) == close_to(0.18058874503045718));  // 0.04 + 0.96 sin^2(pi / 8)
  CHECK(factor_at(cosine, 2) == close_to(0.52));
  CHECK(factor_at(cosine, 4) == 1.0);
  CHECK(factor_at(cosine, 9) == close_to(0.500002));
  CHECK(factor_at(cosine, 13) > 0.02);
  for (const int64_t step : {14, 15, 1'000}) CHECK(factor_at(cosine, step) == close_to(4e-6));

  const LearningRateSchedule line =
      one_cycle(RateOptions(5, 15).start_factor(0.2).end_factor(0.1), Decay::linear);
  const double expected[] = {0.2,  0.4,  0.6,  0.8,  1.0,  0.91, 0.82, 0.73,
                             0.64, 0.55, 0.46, 0.37, 0.28, 0.19, 0.1,  0.1};
  for (int64_t step = 0; step < 16; ++step) CHECK(factor_at(line, step) == close_to(expected[step]));

  // A warm-up of one step is the peak itself.
  for (const Decay anneal : {Decay::cosine, Decay::linear}) {
    const LearningRateSchedule sudden = one_cycle(RateOptions(1, 3).end_factor(0), anneal);
    CHECK(factor_at(sudden, 0) == 1.0);
    CHECK(factor_at(sudden, 1) == close_to(0.5));
    CHECK(factor_at(sudden, 2) == 0.0);
  }
  CHECK(factor_at(one_cycle(RateOptions(3, 9).start_factor(0)), 0) == 0.0);

  CHECK_FALSE(cosine.warmup_ended(rate_progress(4)));
  CHECK(cosine.warmup_ended(rate_progress(5)));
  CHECK(cosine.steps_until_zero() == std::nullopt);
  CHECK(one_cycle(RateOptions(5, 15).end_factor(0.1)).steps_until_zero() == std::nullopt);
  const LearningRateSchedule to_zero = one_cycle(RateOptions(5, 15).end_factor(0));
  CHECK(to_zero.steps_until_zero() == 14);
  CHECK(factor_at(to_zero, 13) > 0.0);
  CHECK(factor_at(to_zero, 14) == 0.0);
  CHECK(factor_at(to_zero, std::numeric_limits<int64_t>::max()) == 0.0);
}

TEST_CASE("in a chain each part begins anew where the one before it ends", "[schedulers][rate]") {
  const LearningRateSchedule chain = warmup_linear({2, 10})
                                         .then(6, warmup_linear(RateOptions(4, 8).start_factor(0.2)))
                                         .then(13, warmup_exponential(RateOptions().gamma(0.5)));
  const double expected[] = {0.5, 1,   1,   0.875, 0.75, 0.625,       // of a decay that would last to step 10
                             0.4, 0.6, 0.8, 1.0,   1.0,  0.75,  0.5,  // the second, cut too
                             1.0, 0.5, 0.25};
  for (int64_t step = 0; step < 16; ++step) {
    CAPTURE(step);
    CHECK(factor_at(chain, step) == close_to(expected[step]));
    CHECK(factor_at(chain, step, 1'000'000) == close_to(expected[step]));
  }
  CHECK_FALSE(chain.by_tokens());
  // The schedules that it was made of are what they were.
  const LearningRateSchedule first = constant_schedule({4}), longer = first.then(10, constant_schedule({2}));
  CHECK(factor_at(first, 10) == 1.0);
  CHECK(factor_at(longer, 10) == 0.5);
  CHECK(factor_at(first.then(3, first), 3) == 0.25);
}

TEST_CASE("a part of a chain may begin at a token, and counts tokens from there", "[schedulers][rate]") {
  const LearningRateSchedule line = warmup_linear(RateOptions().total_tokens(100).end_factor(0.5));
  const LearningRateSchedule chain = constant_schedule({4}).then_at_token(1'000, line);
  CHECK(chain.by_tokens());
  CHECK(factor_at(chain, 1, 999) == 0.5);
  CHECK(factor_at(chain, 1, 1'000) == 1.0);  // however many steps that took
  CHECK(factor_at(chain, 1, 1'020) == close_to(0.9));
  CHECK(factor_at(chain, 9'000, 1'100) == 0.5);
  CHECK(factor_at(chain, 9'000, 999) == 1.0);
  CHECK(constant_schedule().then_at_token(1, constant_schedule()).by_tokens());

  // Steps and tokens in one chain: the latest part that has begun is in force.
  const LearningRateSchedule mixed = chain.then(50, constant_schedule({2})).then_at_token(2'000, line);
  CHECK(mixed.by_tokens());
  CHECK(factor_at(mixed, 49, 1'020) == close_to(0.9));
  CHECK(factor_at(mixed, 50, 1'020) == 0.5);
  CHECK(factor_at(mixed, 50, 0) == 0.5);
  CHECK(factor_at(mixed, 60, 2'040) == close_to(0.8));
  CHECK(factor_at(mixed, 2, 2'040) == close_to(0.8));
  // A decay by tokens in the first part, steps behind it.
  const LearningRateSchedule after = line.then(7, constant_schedule({2}));
  CHECK(after.by_tokens());
  CHECK(factor_at(after, 6, 20) == close_to(0.9));
  CHECK(factor_at(after, 7, 20) == 0.5);
  CHECK(factor_at(line.then(7, warmup_exponential(RateOptions(4).gamma(0.5))), 8, 20) == 0.5);
}

TEST_CASE("a chain has warmed up where no part of it, also of those to come, warms up any more",
          "[schedulers][rate]") {
  constexpr int64_t kMany = std::numeric_limits<int64_t>::max() / 2;
  const auto ended = [](const LearningRateSchedule& schedule, int64_t step, int64_t tokens = 0) {
    return schedule.warmup_ended(rate_progress(step, tokens));
  };
  const LearningRateSchedule late = constant_schedule({4}).then(10, warmup_cosine({5, 20}));
  for (const int64_t step : {0, 4, 9, 10, 14}) CHECK_FALSE(ended(late, step, kMany));
  for (const int64_t step : {15, 40}) CHECK(ended(late, step));
  const LearningRateSchedule early = constant_schedule({4}).then(10, warmup_cosine({0, 20}));
  CHECK_FALSE(ended(early, 3));
  CHECK(ended(early, 4));
  CHECK(ended(early, 10));
  // The second part ends before its warm-up does.
  const LearningRateSchedule cut =
      constant_schedule().then(10, constant_schedule({50})).then(20, constant_schedule());
  CHECK_FALSE(ended(cut, 19));
  CHECK(ended(cut, 20));
  // How many steps a token takes is not known, so that the warm-up before it may still be to come.
  const LearningRateSchedule by_token = late.then_at_token(1'000, constant_schedule());
  for (const int64_t tokens : {int64_t{0}, kMany}) {
    CHECK_FALSE(ended(by_token, 14, tokens));
    CHECK(ended(by_token, 15, tokens));
    CHECK_FALSE(ended(by_token.then(30, constant_schedule({3})), 32, tokens));
    CHECK(ended(by_token.then(30, constant_schedule({3})), 33, tokens));
  }
}

TEST_CASE("a chain ends at zero where its last part does", "[schedulers][rate]") {
  const LearningRateSchedule chain = constant_schedule({4}).then(10, warmup_cosine({5, 20}));
  CHECK(chain.steps_until_zero() == 30);
  CHECK(factor_at(chain, 29) > 0.0);
  CHECK(factor_at(chain, 30) == 0.0);
  CHECK(chain.then(40, one_cycle(RateOptions(2, 7).end_factor(0))).steps_until_zero() == 46);
  CHECK(chain.then(40, constant_schedule()).steps_until_zero() == std::nullopt);
  CHECK(chain.then(40, warmup_linear(RateOptions(0, 5).end_factor(0.1))).steps_until_zero() == std::nullopt);
  CHECK(chain.then_at_token(40, warmup_linear(RateOptions().total_tokens(9))).steps_until_zero() ==
        std::nullopt);
  CHECK(chain.then_at_token(40, constant_schedule()).then(50, warmup_linear({0, 5})).steps_until_zero() ==
        55);
  constexpr int64_t kLast = std::numeric_limits<int64_t>::max();
  CHECK(constant_schedule().then(kLast, warmup_linear({0, 5})).steps_until_zero() == std::nullopt);
  CHECK(constant_schedule().then(kLast - 5, warmup_linear({0, 5})).steps_until_zero() == kLast);
}

TEST_CASE("what a schedule says of itself tells it from all others", "[schedulers][rate]") {
  CHECK(one_cycle({5, 15}).describe() ==
        "one_cycle, warm-up of 5 steps from 0.04, total_steps 15, end_factor 4e-06");
  CHECK(one_cycle(RateOptions(5, 15).start_factor(0.04).end_factor(4e-6)).describe() ==
        one_cycle({5, 15}).describe());
  CHECK(constant_schedule(RateOptions(3).start_factor(0).warm_up(WarmUp::linear)).describe() ==
        constant_schedule({3}).describe());
  CHECK(
      constant_schedule({3}).then(7, constant_schedule()).then_at_token(9, constant_schedule()).describe() ==
      "constant_schedule, linear warm-up of 3 steps from 0; "
      "from step 7 on constant_schedule, linear warm-up of 0 steps from 0; "
      "from token 9 on constant_schedule, linear warm-up of 0 steps from 0");
  const LearningRateSchedule a = constant_schedule({3}), b = constant_schedule(), c = warmup_linear({0, 9});
  const LearningRateSchedule different[] = {one_cycle({5, 15}),
                                            one_cycle({5, 15}, Decay::linear),
                                            one_cycle(RateOptions(5, 15).start_factor(0)),
                                            one_cycle(RateOptions(5, 15).end_factor(0)),
                                            warmup_cosine({5, 15}),
                                            warmup_linear({5, 15}),
                                            warmup_linear(RateOptions(5, 15).start_factor(0.04)),
                                            warmup_linear(RateOptions(5, 15).warm_up(WarmUp::logarithmic)),
                                            a,
                                            b,
                                            c,
                                            a.then(7, b),
                                            b.then(7, a),
                                            a.then(8, b),
                                            a.then(9'007'199'254'740'992, b),
                                            a.then(9'007'199'254'740'993, b),
                                            a.then_at_token(7, b),
                                            a.then(7, b).then(9, c),
                                            a.then(7, c).then(9, b),
                                            a.then(7, b).then_at_token(9, b),
                                            a.then_at_token(9, b).then(7, b)};
  std::set<std::string> texts;
  for (const LearningRateSchedule& schedule : different) {
    INFO(schedule.describe());
    CHECK(texts.insert(schedule.describe()).second);
  }
}

TEST_CASE("warm-up has ended where the next step is beyond it", "[schedulers][rate]") {
  const LearningRateSchedule schedule = warmup_cosine({10, 100});
  CHECK_FALSE(schedule.warmup_ended(rate_progress(0)));
  CHECK_FALSE(schedule.warmup_ended(rate_progress(9)));
  CHECK(schedule.warmup_ended(rate_progress(10)));
  CHECK(constant_schedule().warmup_ended(rate_progress(0)));
}

TEST_CASE("a schedule has ended where its factor no longer changes", "[schedulers][rate]") {
  const auto first_after_end = [](const LearningRateSchedule& schedule) {
    int64_t step = 0;
    while (step < 100 && !schedule.has_ended(rate_progress(step))) ++step;
    for (int64_t later = step; later < 100; ++later) CHECK(schedule.has_ended(rate_progress(later)));
    for (int64_t later = step; later < 100; ++later)
      CHECK(factor_at(schedule, later) == factor_at(schedule, step));
    return step;
  };
  CHECK(first_after_end(constant_schedule()) == 0);
  CHECK(first_after_end(constant_schedule({7})) == 7);
  CHECK(first_after_end(warmup_cosine({3, 20})) == 20);
  CHECK(first_after_end(warmup_linear(RateOptions(3, 20).end_factor(0.5))) == 20);
  CHECK(first_after_end(warmup_stable_decay(RateOptions(3, 20).decay_steps(4))) == 20);
  CHECK(first_after_end(warmup_linear({20, 20})) == 20);
  CHECK(first_after_end(warmup_exponential(RateOptions(2).gamma(1))) == 2);
  CHECK(first_after_end(one_cycle({5, 20})) == 19);  // with its last step
  const LearningRateSchedule chain = warmup_linear({2, 10}).then(30, warmup_cosine({3, 20}));
  CHECK(first_after_end(chain) == 50);
  CHECK(first_after_end(warmup_cosine({2, 60}).then(30, constant_schedule({4}))) == 34);
  const LearningRateSchedule then_by_token =
      constant_schedule({4}).then_at_token(500, warmup_linear(RateOptions().total_tokens(100)));
  CHECK_FALSE(then_by_token.has_ended(rate_progress(50, 599)));
  CHECK(then_by_token.has_ended(rate_progress(50, 600)));
  // These go on for ever.
  CHECK(first_after_end(warmup_exponential(RateOptions(2).gamma(0.5))) == 100);
  CHECK(first_after_end(warmup_inverse_sqrt({4})) == 100);
  CHECK(first_after_end(warmup_cosine_restarts(RateOptions(4).cycle_steps(5))) == 100);
  const LearningRateSchedule by_tokens = warmup_linear(RateOptions(4).total_tokens(1'000));
  CHECK_FALSE(by_tokens.has_ended(rate_progress(50, 999)));
  CHECK_FALSE(by_tokens.has_ended(rate_progress(3, 1'000)));
  CHECK(by_tokens.has_ended(rate_progress(4, 1'000)));
}

TEST_CASE("a learning-rate schedule refuses what is out of range", "[schedulers][rate]") {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  CHECK_THROWS_AS(warmup_cosine({-1, 10}), InvalidArgument);
  CHECK_THROWS_WITH(warmup_cosine({-1, 10}), ContainsSubstring("warmup_cosine") && ContainsSubstring("-1"));
  CHECK_THROWS_WITH(warmup_linear({1, -10}), ContainsSubstring("total_steps"));
  CHECK_THROWS_WITH(warmup_linear(RateOptions(1).total_tokens(-1)), ContainsSubstring("total_tokens"));
  for (const double bad : {-0.1, 1.1, kNan, kInfinity, -kInfinity}) {
    CHECK_THROWS_WITH(warmup_linear(RateOptions(1, 10).start_factor(bad)), ContainsSubstring("start_factor"));
    CHECK_THROWS_WITH(warmup_linear(RateOptions(1, 10).end_factor(bad)), ContainsSubstring("end_factor"));
    CHECK_THROWS_WITH(warmup_exponential(RateOptions(1).gamma(bad)), ContainsSubstring("gamma"));
  }
  for (const double bad : {-1.0, 0.0, kNan, kInfinity}) {
    CHECK_THROWS_WITH(warmup_polynomial(RateOptions(1, 10).power(bad)), ContainsSubstring("power"));
  }
  CHECK_THROWS_WITH(warmup_exponential(RateOptions(1).gamma(0)), ContainsSubstring("gamma"));
  CHECK_THROWS_WITH(warmup_exponential(RateOptions(1).gamma(0.5).every(0)), ContainsSubstring("every"));
  CHECK_THROWS_AS(LearningRateSchedule(static_cast<Decay>(77), {}), InvalidArgument);
  CHECK_THROWS_AS(constant_schedule(RateOptions(1).warm_up(static_cast<WarmUp>(7))), InvalidArgument);
  CHECK_THROWS_AS(factor_at(constant_schedule(), -1), InvalidArgument);
  CHECK_THROWS_AS(factor_at(constant_schedule(), 0, -1), InvalidArgument);
}

TEST_CASE("a learning-rate schedule refuses what is missing, double or without effect",
          "[schedulers][rate]") {
  CHECK_THROWS_WITH(warmup_cosine({10}), ContainsSubstring("total_steps or total_tokens"));
  CHECK_THROWS_WITH(warmup_exponential({10}), ContainsSubstring("needs gamma"));
  CHECK_THROWS_WITH(warmup_cosine(RateOptions(1, 10).total_tokens(10)),
                    ContainsSubstring("total_steps and total_tokens"));
  CHECK_THROWS_WITH(warmup_exponential(RateOptions(1).gamma(0.5).total_tokens(10)),
                    ContainsSubstring("warmup_exponential has no use for total_tokens"));
  CHECK_THROWS_WITH(warmup_inverse_sqrt(RateOptions(1).total_tokens(10)),
                    ContainsSubstring("warmup_inverse_sqrt has no use for total_tokens"));
  CHECK_THROWS_WITH(constant_schedule({1, 10}), ContainsSubstring("no use for total_steps"));
  CHECK_THROWS_WITH(warmup_inverse_sqrt(RateOptions(1).end_factor(0.1)), ContainsSubstring("end_factor"));
  CHECK_THROWS_WITH(warmup_cosine(RateOptions(1, 10).power(2)), ContainsSubstring("no use for power"));
  CHECK_THROWS_WITH(warmup_cosine(RateOptions(1, 10).gamma(0.5)), ContainsSubstring("no use for gamma"));
  CHECK_THROWS_WITH(warmup_cosine(RateOptions(1, 10).every(5)), ContainsSubstring("no use for every"));
  CHECK_THROWS_WITH(warmup_cosine(RateOptions(1, 10).cycle_steps(5)),
                    ContainsSubstring("no use for cycle_steps"));
  CHECK_THROWS_WITH(warmup_cosine(RateOptions(1, 10).cycle_growth(5)),
                    ContainsSubstring("no use for cycle_growth"));
  CHECK_THROWS_WITH(constant_schedule(RateOptions(1).decay_steps(5)),
                    ContainsSubstring("no use for decay_steps"));
  CHECK_THROWS_WITH(warmup_inverse_sqrt(RateOptions(1).decay_tokens(5)),
                    ContainsSubstring("no use for decay_tokens"));
  CHECK_THROWS_WITH(warmup_stable_decay({1, 10}), ContainsSubstring("needs decay_steps"));
  CHECK_THROWS_WITH(warmup_stable_decay(RateOptions(1).total_tokens(10).decay_steps(3)),
                    ContainsSubstring("decay_steps are the last ones of total_steps, which is not given"));
  CHECK_THROWS_WITH(warmup_stable_decay(RateOptions(1, 10).decay_tokens(3)),
                    ContainsSubstring("decay_tokens are the last ones of total_tokens, which is not given"));
  CHECK_THROWS_WITH(warmup_stable_decay(RateOptions(1).decay_steps(3)), ContainsSubstring("total_steps"));
  for (const int64_t bad : {-1, 10}) {
    CHECK_THROWS_WITH(warmup_stable_decay(RateOptions(1, 10).decay_steps(bad)),
                      ContainsSubstring("decay_steps must be from 0 to 9"));
  }
  CHECK_THROWS_WITH(warmup_stable_decay(RateOptions(1).total_tokens(10).decay_tokens(11)),
                    ContainsSubstring("decay_tokens must be from 0 to 10"));
  CHECK_THROWS_WITH(warmup_stable_decay(RateOptions(1).decay_steps(1), Decay::exponential),
                    ContainsSubstring("decays by linear"));
  CHECK_THROWS_WITH(warmup_cosine_restarts({1}), ContainsSubstring("needs cycle_steps"));
  CHECK_THROWS_WITH(warmup_cosine_restarts(RateOptions(1).cycle_steps(0)), ContainsSubstring("cycle_steps"));
  CHECK_THROWS_WITH(warmup_cosine_restarts(RateOptions(1).cycle_steps(1).cycle_growth(0)),
                    ContainsSubstring("cycle_growth"));
  CHECK_THROWS_WITH(warmup_cosine_restarts(RateOptions(1, 10).cycle_steps(5)),
                    ContainsSubstring("no use for total_steps"));
}

TEST_CASE("one cycle refuses what is missing or without effect", "[schedulers][rate]") {
  for (const Decay bad : {Decay::constant, Decay::polynomial, Decay::minus_sqrt, Decay::one_cycle}) {
    CHECK_THROWS_WITH(one_cycle({5, 15}, bad),
                      ContainsSubstring("one_cycle goes up and down by Decay::cosine"));
  }
  CHECK_THROWS_WITH(one_cycle({0, 15}), ContainsSubstring("one_cycle needs warm-up steps"));
  CHECK_THROWS_WITH(one_cycle({-1, 15}), ContainsSubstring("must not be negative"));
  CHECK_THROWS_WITH(one_cycle({5}), ContainsSubstring("one_cycle needs total_steps"));
  CHECK_THROWS_WITH(one_cycle({5, 5}, Decay::linear),
                    ContainsSubstring("a linear one_cycle: the warm-up takes 5 steps") &&
                        ContainsSubstring("total_steps, which counts them, is 5"));
  CHECK_NOTHROW(one_cycle({5, 6}));
  for (const WarmUp way : {WarmUp::linear, WarmUp::logarithmic}) {
    CHECK_THROWS_WITH(one_cycle(RateOptions(5, 15).warm_up(way)),
                      ContainsSubstring("one_cycle has no use for warm_up"));
  }
  CHECK_THROWS_WITH(one_cycle(RateOptions(5).total_tokens(15)),
                    ContainsSubstring("one_cycle has no use for total_tokens"));
  CHECK_THROWS_WITH(one_cycle(RateOptions(5, 15).decay_steps(3)),
                    ContainsSubstring("no use for decay_steps"));
  CHECK_THROWS_WITH(one_cycle(RateOptions(5, 15).decay_tokens(3)),
                    ContainsSubstring("no use for decay_tokens"));
  CHECK_THROWS_WITH(one_cycle(RateOptions(5, 15).power(2)), ContainsSubstring("no use for power"));
  CHECK_THROWS_WITH(one_cycle(RateOptions(5, 15).gamma(0.5)), ContainsSubstring("no use for gamma"));
  CHECK_THROWS_WITH(one_cycle(RateOptions(5, 15).cycle_steps(5)),
                    ContainsSubstring("no use for cycle_steps"));
  CHECK_THROWS_WITH(one_cycle(RateOptions(5, 15).start_factor(1.1)), ContainsSubstring("start_factor"));
  CHECK_THROWS_WITH(one_cycle(RateOptions(5, 15).end_factor(-0.1)), ContainsSubstring("end_factor"));
}

TEST_CASE("a chain refuses parts that would never begin, or whose beginning is not known",
          "[schedulers][rate]") {
  const LearningRateSchedule plain = constant_schedule(), steps = warmup_linear({0, 9});
  const LearningRateSchedule tokens = warmup_linear(RateOptions().total_tokens(9));
  for (const int64_t bad : {0, -1}) {
    CHECK_THROWS_WITH(plain.then(bad, plain), ContainsSubstring("begins at step 1 or later, not at step"));
    CHECK_THROWS_WITH(plain.then_at_token(bad, plain),
                      ContainsSubstring("begins at token 1 or later, not at token"));
  }
  CHECK_NOTHROW(plain.then(1, plain));
  CHECK_NOTHROW(plain.then_at_token(1, plain));
  for (const int64_t bad : {1, 19, 20}) {
    CHECK_THROWS_WITH(plain.then(20, plain).then(bad, plain),
                      ContainsSubstring("does not come after step 20"));
    CHECK_THROWS_WITH(plain.then_at_token(20, plain).then_at_token(bad, plain),
                      ContainsSubstring("does not come after token 20"));
    // The one before it is of the other kind.
    CHECK_THROWS_WITH(plain.then(20, plain).then_at_token(5, plain).then(bad, plain),
                      ContainsSubstring("does not come after step 20"));
  }
  CHECK_NOTHROW(plain.then(20, plain).then(21, plain));
  CHECK_NOTHROW(plain.then(20, plain).then_at_token(5, plain).then(21, plain).then_at_token(6, plain));

  const LearningRateSchedule chain = plain.then(3, steps);
  CHECK_THROWS_WITH(plain.then(5, chain), ContainsSubstring("append its parts one after the other"));
  CHECK_THROWS_WITH(plain.then_at_token(5, chain), ContainsSubstring("append its parts one after the other"));

  CHECK_THROWS_WITH(plain.then(5, tokens), ContainsSubstring("warmup_linear follows tokens") &&
                                               ContainsSubstring("with then_at_token"));
  CHECK_NOTHROW(plain.then_at_token(5, tokens));
  for (const LearningRateSchedule& bad :
       {steps, constant_schedule({1}), warmup_linear(RateOptions(1).total_tokens(9)), warmup_inverse_sqrt({}),
        warmup_exponential(RateOptions().gamma(0.5)), warmup_cosine_restarts(RateOptions().cycle_steps(4)),
        one_cycle({5, 15})}) {
    INFO(bad.describe());
    CHECK_THROWS_WITH(plain.then_at_token(5, bad),
                      ContainsSubstring("has a warm-up or a decay by steps, but the step at which token 5"));
  }
  CHECK_THROWS_AS(factor_at(chain, -1), InvalidArgument);
  CHECK_THROWS_AS(factor_at(chain, 4, -1), InvalidArgument);
}

}  // namespace pacer::testing
