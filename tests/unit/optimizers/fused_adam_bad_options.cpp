// Options that FusedAdam and FusedAdamW refuse, and the names they call parameters by.
#include "support/catch.h"

#include <limits>

#include "support/collectives/victim.h"
#include "support/optimizers/twins.h"

namespace pacer::testing {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(),
                 kInf = std::numeric_limits<double>::infinity();

// A learning rate of -1 and the like: (apply, what the message must name).
struct BadOption {
  void (*apply)(FusedAdamWOptions&);
  std::vector<std::string> parts;
};

const std::vector<BadOption>& bad_options() {
  static const std::vector<BadOption> bad = {
      {[](auto& o) { o.lr(-0.125); }, {"lr", "-0.125", ">= 0"}},
      {[](auto& o) { o.lr(kNaN); }, {"lr", "nan", ">= 0"}},
      {[](auto& o) { o.lr(kInf); }, {"lr", "inf", ">= 0"}},
      {[](auto& o) {
         o.betas({-0.5, 0.9});
       },
       {"beta", "-0.5", "[0, 1)"}},
      {[](auto& o) {
         o.betas({1.0, 0.9});
       },
       {"beta", "1", "[0, 1)"}},
      {[](auto& o) {
         o.betas({kNaN, 0.9});
       },
       {"beta", "nan", "[0, 1)"}},
      {[](auto& o) {
         o.betas({0.9, -0.25});
       },
       {"beta", "-0.25", "[0, 1)"}},
      {[](auto& o) {
         o.betas({0.9, 1.5});
       },
       {"beta", "1.5", "[0, 1)"}},
      {[](auto& o) {
         o.betas({0.9, kInf});
       },
       {"beta", "inf", "[0, 1)"}},
      {[](auto& o) { o.eps(-1e-3); }, {"eps", "-0.001", ">= 0"}},
      {[](auto& o) { o.eps(kNaN); }, {"eps", "nan", ">= 0"}},
      {[](auto& o) { o.eps(kInf); }, {"eps", "inf", ">= 0"}},
      {[](auto& o) { o.weight_decay(-2); }, {"weight_decay", "-2", ">= 0"}},
      {[](auto& o) { o.weight_decay(kNaN); }, {"weight_decay", "nan", ">= 0"}},
      {[](auto& o) { o.weight_decay(kInf); }, {"weight_decay", "inf", ">= 0"}},
      {[](auto& o) { o.rounding(Rounding::stochastic).master_weights(MasterWeights::fp32); },
       {"stochastic", "master"}},
      {[](auto& o) { o.rounding(Rounding::stochastic).master_weights(MasterWeights::remainder); },
       {"stochastic", "master"}},
  };
  return bad;
}

TEST_CASE("a bad option is refused by name, value and range, whenever it is set", "[fused_adam]") {
  for (const BadOption& bad : bad_options()) {
    CAPTURE(bad.parts[0], bad.parts[1]);
    FusedAdamWOptions options(0.1);
    bad.apply(options);
    const auto parameters = random_parameters({{2}}, at::kFloat);
    const auto group = [&] {
      return torch::optim::OptimizerParamGroup(parameters, std::make_unique<FusedAdamWOptions>(options));
    };
    for (const auto& part : bad.parts) {
      CHECK(contains(refusal([&] { FusedAdamW(parameters, options); }), part));
      CHECK(contains(refusal([&] { FusedAdamW({group()}); }), part));
    }
    Victim victim;
    CHECK(unless_refused(victim.optimizer, bad.parts, [&] { victim.optimizer.add_param_group(group()); }) ==
          "");
    CHECK(victim.optimizer.param_groups().size() == 1);

    CHECK(unless_refused(victim.optimizer, bad.parts, [&] {
            // Put back before the comparison: a NaN does not equal itself.
            const FusedAdamWOptions good = options_of(victim.optimizer);
            bad.apply(options_of(victim.optimizer));
            try {
              victim.optimizer.step();
            } catch (...) {
              options_of(victim.optimizer) = good;
              throw;
            }
          }) == "");
    CHECK(victim.recovers());
  }
}

TEST_CASE("zero is a good value of every option that may be zero", "[fused_adam]") {
  Twins<FusedAdam> twins(random_parameters({{5}}, at::kDouble),
                         torch::optim::AdamOptions(0).betas({0, 0}).eps(0));
  twins.step_with_random_gradients();
  options_of(twins.optimizer).lr(0.1);
  options_of(twins.peer).lr(0.1);
  twins.step_with_random_gradients();
  CHECK(twins.apart() <= 1e-14);
}

TEST_CASE("finite_check that differs between groups is refused", "[fused_adam]") {
  const auto parameters = random_parameters({{2}, {3}}, at::kFloat);
  const auto group = [&](size_t i, bool check) {
    return torch::optim::OptimizerParamGroup(
        {parameters[i]}, std::make_unique<FusedAdamWOptions>(FusedAdamWOptions(0.1).finite_check(check)));
  };
  set_random_gradients(parameters);
  for (const bool first : {false, true}) {
    const std::string message = refusal([&] { FusedAdamW({group(0, first), group(1, !first)}).step(); });
    CHECK(contains(message, "finite_check"));
    FusedAdamW optimizer({group(0, first), group(1, first)});
    optimizer.step();
    options_of(optimizer, 1).finite_check(!first);
    CHECK(unless_refused(optimizer, {"finite_check", "1"}, [&] { optimizer.step(); }) == "");
    options_of(optimizer, 0).finite_check(!first);
    optimizer.step();
    CHECK(state_of(optimizer, parameters[0]).step() == 2);
  }
}

TEST_CASE("fp16 without an fp32 master copy is refused", "[fused_adam]") {
  for (const auto master : {MasterWeights::remainder, MasterWeights::none}) {
    const auto parameters = random_parameters({{2}, {3}}, at::kHalf);
    set_random_gradients(parameters);
    const auto options = FusedAdamWOptions(0.1).master_weights(master);
    CHECK(contains(refusal([&] { FusedAdamW(parameters, options).step(); }),
                   "parameter 0 of group 0 (make the optimizer of"));
    FusedAdamW optimizer(parameters);
    optimizer.step();
    options_of(optimizer).master_weights(master);
    CHECK(unless_refused(optimizer, {"parameter 0 of group 0", "fp16"}, [&] { optimizer.step(); }) == "");
  }
}

TEST_CASE("names come from the module, the group, or the position", "[fused_adam]") {
  Victim victim;
  CHECK(victim.optimizer.parameter_name(victim.parameters[0]) == "encoder.weight");
  CHECK(victim.optimizer.parameter_name(victim.parameters[2]) == "head.weight");
  const auto more = random_parameters({{2}, {3}, {4}}, at::kFloat);
  NamedParameters named;
  named.insert("late.weight", more[0]);
  victim.optimizer.add_param_group(NamedParamGroup(named, std::make_unique<FusedAdamWOptions>(0.5)));
  victim.optimizer.add_param_group(torch::optim::OptimizerParamGroup({more[1]}));
  CHECK(victim.optimizer.parameter_name(more[0]) == "late.weight");
  CHECK(victim.optimizer.parameter_name(more[1]) == "2.0");
  CHECK(victim.optimizer.parameter_name(more[2]) == "unknown");
  CHECK(victim.optimizer.parameter_name(victim.parameters[0].detach()) == "unknown");
  CHECK(victim.optimizer.parameter_name(Tensor()) == "unknown");
  CHECK(options_of(victim.optimizer, 1).lr() == 0.5);
  CHECK(options_of(victim.optimizer, 0).amsgrad());

  FusedAdam grouped({NamedParamGroup(named), NamedParamGroup(Victim::with_names(victim.parameters))});
  CHECK(grouped.parameter_name(more[0]) == "late.weight");
  CHECK(grouped.parameter_name(victim.parameters[1]) == "encoder.bias");
  FusedAdam moved(std::move(grouped));
  CHECK(moved.parameter_name(more[0]) == "late.weight");
  FusedAdam unnamed({more[0], more[1]});
  CHECK(unnamed.parameter_name(more[1]) == "0.1");
}

}  // namespace
}  // namespace pacer::testing
