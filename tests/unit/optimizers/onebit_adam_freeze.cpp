// When OneBitAdam's variance freezes, and how one that was hardly fed is told.
#include <limits>

#include <pacer/optimizers/detail/freeze_rule.h>

#include "support/catch.h"

#include "support/optimizers/contract.h"
#include "support/optimizers/onebit_adam_ranks.h"
#include "support/optimizers/onebit_lamb_ranks.h"

namespace pacer::testing::onebit_freeze {
namespace {

// The first t > D of the window within 4 % of what was D steps ago, else the window's last.
int64_t expected_freeze(int64_t planned, int64_t distance, const std::vector<double>& norms) {
  const int64_t begin = (15 * planned + 99) / 100, end = 30 * planned / 100;
  for (int64_t t = std::max(begin, distance + 1); t < end; ++t) {
    const double ratio = norms[static_cast<size_t>(t)] / norms[static_cast<size_t>(t - distance)];
    if (ratio >= 0.96 && ratio <= 1 / 0.96) return t;
  }
  return end;
}

int64_t freeze_of(detail::FreezeRule& rule, const std::vector<double>& norms, int64_t first = 1) {
  for (int64_t t = first;; ++t) {
    // What nobody needs is garbage, so that it shows where it is looked at all the same.
    const double norm = rule.needs_norm(t) ? norms.at(static_cast<size_t>(t)) : -1e300;
    if (rule.is_due(t, norm)) return t;
  }
}

// Norms by step that now stand still and now move.
std::vector<double> wandering_norms(uint64_t seed, int64_t steps) {
  Samples samples(seed);
  std::vector<double> norms = {1};
  double drift = 0;
  for (int64_t t = 1; t <= steps; ++t) {
    if (samples.chance(0.05)) drift = samples.chance(0.3) ? 0 : 0.05 * (samples.uniform() - 0.5);
    norms.push_back(norms.back() * (1 + drift + 0.004 * (samples.uniform() - 0.5)));
  }
  return norms;
}

// The mean of two ranks' gradients is `size` everywhere.
void set_constant_gradients(OneBitAdamRanks& ranks, double size) {
  for (const auto& of_rank : ranks.parameters) {
    for (const Tensor& p : of_rank) p.mutable_grad() = at::full_like(p, size).detach();
  }
}

std::string plain_step(OneBitAdamRanks& ranks, bool freeze_allowed) {
  return ranks.run([&](size_t rank) {
    OneBitAdam& optimizer = *ranks.optimizers[rank];
    StepInputs inputs;
    inputs.freeze_allowed = freeze_allowed;
    contract(optimizer).prepare(inputs);
    contract(optimizer).conclude(contract(optimizer).enqueue());
  });
}

}  // namespace

TEST_CASE("the freeze window is ceil(0.15 P) to floor(0.30 P)", "[onebit_adam][freeze_rule]") {
  const auto check = [](int64_t planned, int64_t begin, int64_t end) {
    const detail::FreezeRule rule(planned, 0.9);
    return rule.window_begin() == begin && rule.window_end() == end && 1 <= begin && begin <= end;
  };
  for (int64_t planned = 4; planned <= 20000; ++planned) {
    if (!check(planned, (15 * planned + 99) / 100, 30 * planned / 100)) FAIL("planned " << planned);
  }
  // 15 P does not fit 64 bits here.
  CHECK(check(1'000'000'000'000'000'000, 150'000'000'000'000'000, 300'000'000'000'000'000));
  CHECK(check(1'000'000'000'000'000'007, 150'000'000'000'000'002, 300'000'000'000'000'002));
  CHECK(detail::FreezeRule(100, 0.999).distance() == 1000);
  CHECK(detail::FreezeRule(100, 0.95).distance() == 20);
  CHECK(detail::FreezeRule(100, 0.0).distance() == 1);
  for (const int64_t planned : {3, 0, -1}) {
    CHECK(contains(refusal([&] { detail::FreezeRule(planned, 0.9); }), "at least 4 planned steps"));
  }
}

TEST_CASE("the rule fires at the first step whose variance stands still, else at the window's end",
          "[onebit_adam][freeze_rule]") {
  int64_t at_end = 0, at_begin = 0, between = 0;
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    Samples samples(seed);
    const int64_t planned = 4 + samples.below(seed % 2 ? 2000 : 100);
    const double beta2 = 1 - 1 / static_cast<double>(1 + samples.below(200));
    detail::FreezeRule rule(planned, beta2);
    const auto norms = wandering_norms(seed, planned);
    const int64_t expected = expected_freeze(planned, rule.distance(), norms);
    CAPTURE(seed, planned, beta2);
    REQUIRE(freeze_of(rule, norms) == expected);
    (expected == rule.window_end() ? at_end : expected == rule.window_begin() ? at_begin : between) += 1;

    // Interrupted anywhere, another rule goes on from the norms that the first one remembers.
    detail::FreezeRule first(planned, beta2), second(planned, beta2);
    const int64_t stop = samples.below(expected);
    for (int64_t t = 1; t <= stop; ++t)
      first.is_due(t, first.needs_norm(t) ? norms[static_cast<size_t>(t)] : 0);
    second.set_norms(first.norms());
    REQUIRE(freeze_of(second, norms, stop + 1) == expected);
    CHECK(contains(refusal([&] { second.set_norms(std::vector<double>(rule.norms().size() + 1, 1.0)); }),
                   "norms"));
  }
  CHECK(at_end > 100);
  CHECK(at_begin > 100);
  CHECK(between > 100);
}

TEST_CASE("four per cent is the boundary, both ways, and the step D itself never counts",
          "[onebit_adam][freeze_rule]") {
  const auto fires = [](double ratio) {
    detail::FreezeRule rule(40, 0.75);  // window 6 .. 12, D = 4
    std::vector<double> norms(41, 1.0);
    norms[6] = ratio;
    for (size_t t = 7; t < norms.size(); ++t) norms[t] = 3 * norms[t - 1];
    return freeze_of(rule, norms);
  };
  CHECK(fires(0.9601) == 6);
  CHECK(fires(0.9599) == 12);
  CHECK(fires(1.0416) == 6);  // 1 / 0.96 = 1.041666...
  CHECK(fires(1.0417) == 12);
  CHECK(fires(0.0) == 12);
  CHECK(fires(std::numeric_limits<double>::quiet_NaN()) == 12);
  detail::FreezeRule late(40, 0.9);  // window 6 .. 12, D = 10
  CHECK(freeze_of(late, std::vector<double>(41, 1.0)) == 11);
  detail::FreezeRule later(40, 0.95);  // D = 20
  CHECK(freeze_of(later, std::vector<double>(41, 1.0)) == 12);
}

TEST_CASE("freeze_automatically freezes where the rule says, also after a resume", "[onebit_adam]") {
  int64_t kinds[2] = {0, 0};
  for (uint64_t seed = 0; seed < 12; ++seed) {
    CAPTURE(seed);
    const auto options = OneBitAdamOptions(0.01).freeze_automatically(100).betas({0.9, 0.9});
    const std::vector<OneBitAdamGroup> groups = {{{{40}, {3, 7}}, options},
                                                 {{{9}}, OneBitAdamOptions(options).compress(false)}};
    OneBitAdamRanks ranks(2, groups);
    OneBitAdamTextbook textbook = textbook_of(ranks, groups);  // it knows no rule
    const auto sizes = wandering_norms(100 + seed, 100);
    std::vector<double> norms = {0};
    for (int64_t t = 1; t <= 30; ++t) {
      auto gradients = ranks.gradients(t);
      for (auto& of_rank : gradients) {
        for (Tensor& g : of_rank) g.mul_(sizes[static_cast<size_t>(t)] * (seed % 2 ? 1.0 : std::pow(0.9, t)));
      }
      REQUIRE(ranks.step(gradients) == "");
      textbook.step(textbook_gradients(gradients));
      norms.push_back(textbook.variance_norm());
      if (ranks.optimizers[0]->frozen_at()) break;
      if (t % 9 == 4) ranks.resume();
    }
    const int64_t expected = expected_freeze(100, 10, [&] {
      std::vector<double> all = norms;
      all.resize(101, 1e300);
      return all;
    }());
    for (const auto& optimizer : ranks.optimizers) REQUIRE(optimizer->frozen_at() == expected);
    ++kinds[expected == 30];
  }
  CHECK(kinds[0] > 0);
  CHECK(kinds[1] > 0);
}

TEST_CASE("a freeze that is due waits for freeze_allowed, with a warning", "[onebit_adam]") {
  for (const bool resumes : {false, true}) {
    const auto options = OneBitAdamOptions(0.01).freeze_automatically(40).betas({0.9, 0.75});
    OneBitAdamRanks ranks(1, {{{{40}}, options}});
    for (int64_t t = 1; t <= 15; ++t) {
      CAPTURE(t);
      // It stands still at step 6 only: what was due then stays due.
      set_constant_gradients(ranks, t <= 6 ? 1.0 : std::pow(1.5, static_cast<double>(t)));
      REQUIRE(plain_step(ranks, /*freeze_allowed=*/t >= 9) == "");
      const auto expected = t >= 9 ? std::optional<int64_t>(9) : std::nullopt;
      REQUIRE(ranks.optimizers[0]->frozen_at() == expected);
      REQUIRE(contains(ranks.said[0], "freezes once they have ended") == (t >= 6));
      if (resumes && t == 7) ranks.resume();
    }
    // After a resume it may be said once more.
    if (resumes) continue;
    CHECK(ranks.said[0].find("freezes once") == ranks.said[0].rfind("freezes once"));
  }
  // allow_early_freeze does not wait, and neither does an explicit step that may.
  OneBitAdamRanks early(1, {{{{40}}, OneBitAdamOptions(0.01).freeze_step(2).allow_early_freeze(true)}});
  for (int64_t t = 1; t <= 3; ++t) {
    set_constant_gradients(early, 1.0);
    REQUIRE(plain_step(early, /*freeze_allowed=*/false) == "");
    CHECK(early.optimizers[0]->frozen_at() == (t >= 2 ? std::optional<int64_t>(2) : std::nullopt));
  }
}

TEMPLATE_TEST_CASE("a variance that is frozen too early is told, with settings that would do",
                   "[onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  const auto said_at = [](int64_t freeze_step, double beta2, bool bias_correction) {
    const auto options = OptionsOf<TestType>(0.01).betas({0.9, beta2}).bias_correction(bias_correction);
    OneBitRanks<TestType> ranks(1, {{{{40}}, OptionsOf<TestType>(options).freeze_step(freeze_step)}});
    for (int64_t t = 1; t <= freeze_step; ++t) {
      REQUIRE(ranks.step(ranks.gradients(0)) == "");
    }
    REQUIRE(ranks.optimizers[0]->frozen_at() == freeze_step);
    return ranks.said[0];
  };
  CHECK(contains(said_at(9, 0.9, true),
                 "a mean of 9 squared gradients is still noisy; set freeze_step to 10 or more"));
  CHECK_FALSE(contains(said_at(10, 0.9, true), "freeze_step to"));
  CHECK_FALSE(contains(said_at(9, 0.8, true), "freeze_step to"));
  CHECK(contains(said_at(49, 0.999, true),
                 "a mean of 49 squared gradients is still noisy; set freeze_step to 50 or more"));
  // 50 squares of nearly the same weight: as good as with beta2 = 0.98, whose window they would fill.
  CHECK_FALSE(contains(said_at(50, 0.999, true), "freeze_step to"));
  CHECK_FALSE(contains(said_at(50, 0.98, true), "freeze_step to"));
  // Without bias correction it is a matter of the window: 1 - 0.999^60 = 0.058.
  CHECK(contains(
      said_at(60, 0.999, false),
      "without bias correction it had grown to 6 % of the mean of squared gradients (beta2 = 0.999); "
      "set freeze_step to 1000 or more, bias_correction(true), or the second of betas to 0.98 or less"));
  CHECK_FALSE(contains(said_at(60, 0.98, false), "set freeze_step to"));
}

}  // namespace pacer::testing::onebit_freeze
