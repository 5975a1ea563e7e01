// FusedAdam and FusedAdamW with state_bits(8): how far a training goes from one in 32 bits, and what is refused. What all
// rules share is in state_8bit_formats.cpp.
#include "support/catch.h"

#include "own_optimizer/lion.h"
#include "support/optimizers/state_8bit.h"

namespace pacer::testing {
namespace {

using Run = StateRun<FusedAdamW>;

FusedAdamWOptions in_8_bits(const FusedAdamWOptions& options = FusedAdamWOptions(0.02)) {
  return FusedAdamWOptions(options).state_bits(8);
}

}  // namespace

TEST_CASE("the first step in 8 bits is that in 32, which reads no moments", "[fused_adam][adam8]") {
  for (const Mode& mode : all_modes()) {
    if (mode.dtype == at::kDouble || mode.master_weights == MasterWeights::none) continue;
    INFO(mode.name);
    const auto values = random_parameters(kStateShapes, mode.dtype);
    const auto options = with_mode(FusedAdamWOptions(0.02).weight_decay(0.1), mode);
    Run wide(values, options), narrow(values, in_8_bits(options));
    wide.step(1, 3), narrow.step(1, 3);
    CHECK(same_bits(wide.parameters, narrow.parameters));
    wide.step(3, 4), narrow.step(3, 4);
    CHECK_FALSE(same_bits(wide.parameters, narrow.parameters));
    CHECK(distance(wide.parameters, narrow.parameters) < 4 * 0.02);
  }
}

// Its second moment is below half a code of its group's, and its first one is not.
TEST_CASE("an element with far smaller gradients than its neighbours takes no larger steps",
          "[fused_adam][adam8]") {
  Run run({torch::zeros({32}).requires_grad_()}, in_8_bits(FusedAdamWOptions(0.01).weight_decay(0)));
  const Tensor& p = run.parameters[0];
  Tensor before = p.detach().clone();
  for (int step = 0; step < 60; ++step) {
    // The others' signs change, so that their first moments are small.
    p.mutable_grad() = torch::full({32}, step % 2 == 0 ? 1.0 : -1.0);
    p.mutable_grad()[5] = 1e-3;
    run.optimizer.step();
    REQUIRE((p.detach() - before)[5].abs().item<double>() < 0.011);
    before = p.detach().clone();
  }
}

// Noise pushes both runs about their target, and in either the mean of the last half of the steps is its estimate. A code
// is at most 1/254 of the scale wrong near the scale and finer below, so that one update is off by a few hundredths
// of the rate; the errors of steps have no common sign.
TEST_CASE("200 steps in 8 bits end where those in 32 bits do", "[fused_adam][adam8]") {
  torch::manual_seed(7);
  const Tensor target = torch::randn({96, 80}), noise_of = torch::rand({96, 80}).mul(3).exp();
  const auto loss_after = [&](const FusedAdamWOptions& options) {
    Run run({torch::zeros({96, 80}).requires_grad_()}, options);
    torch::manual_seed(11);
    Tensor mean = torch::zeros_like(target);
    for (int step = 0; step < 200; ++step) {
      const Tensor& p = run.parameters[0];
      p.mutable_grad() = (p.detach() - target + torch::randn_like(target).mul(0.3)) * noise_of;
      run.optimizer.step();
      if (step >= 100) mean += run.parameters[0].detach() / 100;
    }
    return std::make_pair((mean - target).square().mean().sqrt().item<double>(),
                          run.parameters[0].detach().clone());
  };
  const auto options = FusedAdamWOptions(0.03).weight_decay(0);
  const auto [wide, wide_values] = loss_after(options);
  const auto [narrow, narrow_values] = loss_after(in_8_bits(options));
  INFO("from the target: " << wide << " and " << narrow << ", from each other "
                           << (wide_values - narrow_values).square().mean().sqrt().item<double>());
  CHECK(narrow < 1.02 * wide);
  CHECK((wide_values - narrow_values).square().mean().sqrt().item<double>() < 0.7 * 0.03);
}

TEST_CASE("what has no state in 8 bits refuses it in a sentence", "[fused_adam][adam8]") {
  const auto p = random_parameters({{4, 4}}, at::kFloat);
  const auto says = [](const auto& make, const std::string& part) { return contains(refusal(make), part); };
  CHECK(
      says([&] { FusedAdamW(p, FusedAdamWOptions().state_bits(16)); }, "state_bits must be 8 or 32, not 16"));
  CHECK(says([&] { FusedAdamW(p, FusedAdamWOptions().state_bits(8).amsgrad(true)); }, "amsgrad"));
  CHECK(says([&] { Lion(p, lion_options(0.01).state_bits(8)); }, "leave state_bits at 32"));
  const auto wide = random_parameters({{4, 4}}, at::kDouble);
  Run run(wide, in_8_bits());
  CHECK(contains(refusal([&] { run.step(1, 1); }), "is fp64"));
}

TEST_CASE("a gradient that is not finite leaves the state alone with finite_check, and shows without it",
          "[fused_adam][adam8]") {
  for (const bool is_checked : {true, false}) {
    Run run(random_parameters({{100}}, at::kFloat),
            in_8_bits(FusedAdamWOptions(0.02).finite_check(is_checked)));
    run.step(2, 1);
    const auto before = snapshot(run.optimizer);
    Tensor gradient = torch::ones({100});
    gradient[40] = std::numeric_limits<float>::infinity();
    run.parameters[0].mutable_grad() = gradient;
    run.optimizer.step();
    auto after = snapshot(run.optimizer);
    after.parameters[0].gradient = before.parameters[0].gradient;
    CHECK(difference(before, after).empty() == is_checked);
    run.step(1, 2);
    const Tensor bad = run.parameters[0].isnan();
    CHECK(count_true(bad) == (is_checked ? 0 : 32));
    CHECK(count_true(bad.slice(0, 32, 64)) == (is_checked ? 0 : 32));
  }
}

}  // namespace pacer::testing
