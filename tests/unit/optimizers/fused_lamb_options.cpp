// What FusedLamb is told: its options, groups and parameters, and what of them it refuses.
#include "support/catch.h"

#include <cmath>

#include "support/kernels/lamb.h"
#include "support/optimizers/contract.h"

namespace pacer::testing::lamb {
namespace {

// (apply, what the message must name)
struct BadOption {
  void (*apply)(FusedLambOptions&);
  std::vector<std::string> parts;
};

const std::vector<BadOption>& bad_options() {
  static const std::vector<BadOption> bad = {
      {[](auto& o) { o.lr(-0.125); }, {"FusedLamb", "lr", "-0.125", ">= 0"}},
      {[](auto& o) { o.eps(std::nan("")); }, {"eps", "nan", ">= 0"}},
      {[](auto& o) { o.weight_decay(-2); }, {"weight_decay", "-2", ">= 0"}},
      {[](auto& o) {
         o.betas({0.9, 1.5});
       },
       {"beta", "1.5", "[0, 1)"}},
      {[](auto& o) { o.min_coeff(-0.5); }, {"min_coeff", "-0.5", ">= 0"}},
      {[](auto& o) { o.min_coeff(std::nan("")); }, {"min_coeff", "nan", ">= 0"}},
      {[](auto& o) { o.min_coeff(HUGE_VAL); }, {"min_coeff", "inf", ">= 0"}},
      {[](auto& o) { o.min_coeff(2).max_coeff(1.5); }, {"max_coeff", ">= min_coeff (2)", "1.5"}},
      {[](auto& o) { o.max_coeff(std::nan("")); }, {"max_coeff", "nan"}},
      {[](auto& o) { o.max_coeff(HUGE_VAL); }, {"max_coeff", "finite", "inf"}},
      {[](auto& o) { o.rounding(Rounding::stochastic); }, {"stochastic", "master"}},
  };
  return bad;
}

}  // namespace

TEST_CASE("a bad option of FusedLamb is refused by name, value and range, whenever it is set",
          "[fused_lamb]") {
  for (const BadOption& bad : bad_options()) {
    CAPTURE(bad.parts[0], bad.parts[1]);
    FusedLambOptions options(0.1);
    bad.apply(options);
    const auto parameters = random_parameters({{2}, {3}}, at::kFloat);
    for (const auto& part : bad.parts) {
      CHECK(contains(refusal([&] { FusedLamb(parameters, options); }), part));
    }
    FusedLamb optimizer({parameters[0]}, FusedLambOptions(0.1));
    set_random_gradients(parameters);
    optimizer.step();
    const auto group = [&] {
      return torch::optim::OptimizerParamGroup({parameters[1]}, std::make_unique<FusedLambOptions>(options));
    };
    CHECK(unless_refused(optimizer, bad.parts, [&] { optimizer.add_param_group(group()); }) == "");
    CHECK(unless_refused(optimizer, bad.parts, [&] {
            const FusedLambOptions good = options_of(optimizer);
            bad.apply(options_of(optimizer));
            try {
              optimizer.step();
            } catch (...) {
              options_of(optimizer) = good;  // a NaN does not equal itself
              throw;
            }
          }) == "");
    optimizer.step();
    CHECK(state_of(optimizer, parameters[0]).step() == 2);
  }
}

TEST_CASE("options of another optimizer and parameters FusedLamb cannot take are refused", "[fused_lamb]") {
  const auto parameters = random_parameters({{2}, {3}}, at::kFloat);
  const auto group = [&] {
    return torch::optim::OptimizerParamGroup(parameters, std::make_unique<FusedAdamWOptions>(0.1));
  };
  CHECK(contains(refusal([&] { FusedLamb({group()}); }), "FusedLambOptions"));
  CHECK(contains(refusal([&] { FusedLamb({parameters[0], parameters[0]}); }), "twice"));
  const auto halves = random_parameters({{2}}, at::kHalf);
  set_random_gradients(halves);
  FusedLamb optimizer(halves, FusedLambOptions(0.1).master_weights(MasterWeights::none));
  CHECK(unless_refused(optimizer, {"parameter 0 of group 0", "fp16"}, [&] { optimizer.step(); }) == "");
  // A step that was refused half-way leaves no ratio behind.
  const std::vector<Tensor> mixed = {random_parameters({{2}}, at::kBFloat16)[0], halves[0]};
  set_random_gradients(mixed);
  FusedLamb of_mixed(mixed, FusedLambOptions(0.1).master_weights(MasterWeights::none));
  CHECK(unless_refused(of_mixed, {"parameter 1 of group 0", "fp16"}, [&] { of_mixed.step(); }) == "");
  CHECK(of_mixed.trust_ratio(mixed[0]) == 1);
  CHECK(contains(refusal([&] { optimizer.trust_ratio(parameters[0]); }), "trust ratio"));
  CHECK(contains(refusal([&] { optimizer.trust_ratio(Tensor()); }), "trust ratio"));
}

TEST_CASE("options of FusedLamb are equal where every field is", "[fused_lamb]") {
  using Options = FusedLambOptions;
  void (*const changes[])(Options&) = {
      [](Options& o) { o.lr(0.5); },
      [](Options& o) { o.initial_lr(0.5); },
      [](Options& o) {
        o.betas({0.5, 0.999});
      },
      [](Options& o) {
        o.betas({0.9, 0.5});
      },
      [](Options& o) { o.eps(0.5); },
      [](Options& o) { o.weight_decay(0.5); },
      [](Options& o) { o.bias_correction(false); },
      [](Options& o) { o.min_coeff(0.5); },
      [](Options& o) { o.max_coeff(0.5); },
      [](Options& o) { o.adapt(false); },
      [](Options& o) { o.finite_check(true); },
      [](Options& o) { o.master_weights(MasterWeights::fp32); },
      [](Options& o) { o.rounding(Rounding::stochastic); },
      [](Options& o) { o.seed(5); },
  };
  CHECK(Options() == Options(1e-3));
  for (const auto change : changes) {
    Options changed, same;
    change(changed);
    change(same);
    CHECK_FALSE(changed == Options());
    CHECK(changed == same);
  }
}

TEST_CASE("the base rate of FusedLamb stays with its options", "[fused_lamb]") {
  const auto parameters = random_parameters({{3}}, at::kFloat);
  FusedLamb optimizer(parameters, FusedLambOptions(0.25));
  CHECK(contract(optimizer).base_lr(0) == 0.25);
  options_of(optimizer).lr(0.125);
  CHECK(contract(optimizer).base_lr(0) == 0.25);
  CHECK(optimizer.param_groups()[0].options().get_lr() == 0.125);
}

}  // namespace pacer::testing::lamb
