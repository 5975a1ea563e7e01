// What only OneBitLamb refuses.
#include <limits>

#include "support/catch.h"

#include "support/optimizers/onebit_lamb_ranks.h"
#include "support/optimizers/onebit_refusals.h"

namespace pacer::testing::onebit_lamb_refusals {

TEST_CASE("limits of coefficients and factors that make no sense are refused", "[onebit_lamb][refusals]") {
  using O = OneBitLambOptions;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto with = [&](const auto& set) {
    O options = frozen_at_two<OneBitLamb>();
    set(options);
    return options;
  };
  const std::vector<std::pair<O, std::vector<std::string>>> cases = {
      {with([](O& o) { o.min_coeff(-1); }), {"OneBitLamb", "min_coeff", "-1"}},
      {with([](O& o) { o.min_coeff(0.5).max_coeff(0.25); }), {"OneBitLamb", "max_coeff", "0.25"}},
      {with([&](O& o) { o.max_coeff(nan); }), {"OneBitLamb", "max_coeff", "nan"}},
      {with([](O& o) { o.coeff_beta(-0.1); }), {"OneBitLamb", "coeff_beta", "-0.1"}},
      {with([](O& o) { o.coeff_beta(1.0); }), {"OneBitLamb", "coeff_beta", "1"}},
      {with([&](O& o) { o.coeff_beta(nan); }), {"OneBitLamb", "coeff_beta", "nan"}},
      {with([](O& o) { o.factor_min(3).factor_max(2); }), {"OneBitLamb", "factor_min", "3", "2"}},
      {with([](O& o) { o.factor_min(-0.5); }), {"OneBitLamb", "factor_min", "-0.5"}},
      {with([](O& o) { o.factor_min(0); }), {"OneBitLamb", "factor_min", "0"}},
      {with([&](O& o) { o.factor_min(nan); }), {"OneBitLamb", "factor_min", "nan"}},
      {with([&](O& o) { o.factor_max(nan); }), {"OneBitLamb", "factor_max", "nan"}},
      {with([](O& o) { o.factor_threshold(-0.1); }), {"OneBitLamb", "factor_threshold", "-0.1"}},
      {with([](O& o) { o.factor_threshold(1.0); }), {"OneBitLamb", "factor_threshold", "1"}},
      {with([&](O& o) { o.factor_threshold(nan); }), {"OneBitLamb", "factor_threshold", "nan"}},
  };
  for (const auto& [options, parts] : cases) {
    CHECK(unless_sentence(refusal_of<OneBitLamb>(options), parts) == "");
  }
  const auto edges = with([](O& o) {
    o.min_coeff(0).max_coeff(0).coeff_beta(0).factor_min(1).factor_max(1).factor_threshold(0);
  });
  CHECK(refusal_of<OneBitLamb>(edges) == "<no exception>");
}

TEST_CASE("limits of coefficients and factors are each group's own", "[onebit_lamb][refusals]") {
  const auto base = frozen_at_two<OneBitLamb>();
  auto own = OneBitLambOptions(base).min_coeff(1).max_coeff(2).coeff_beta(0.5).adapt(false);
  own.factor_min(0.1).factor_max(9).factor_threshold(0.2);
  CHECK(refusal([&] { OneBitLambRanks(1, {{{{4}}, base}, {{{3}}, own}}); }) == "<no exception>");
}

TEST_CASE("1-bit LAMB says which parameters it knows", "[onebit_lamb][refusals]") {
  OneBitLambRanks ranks(1, small_groups(frozen_at_two<OneBitLamb>()));
  const Tensor stranger = at::ones({3});
  const OneBitLamb& optimizer = *ranks.optimizers[0];
  CHECK(unless_sentence(refusal([&] { optimizer.coefficient(stranger); }), {}) == "");
  CHECK(unless_sentence(refusal([&] { optimizer.factor(stranger); }), {}) == "");
  CHECK(unless_sentence(refusal([&] { optimizer.momentum_scale(stranger); }), {}) == "");
}

}  // namespace pacer::testing::onebit_lamb_refusals
