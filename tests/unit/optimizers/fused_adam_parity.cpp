// FusedAdam and FusedAdamW against three peers that share no code with them: torch::optim::Adam and AdamW,
// at::_fused_adamw_, and a restatement in double precision.
#include "support/catch.h"

#include <ATen/ops/_fused_adamw.h>
#include <torch/optim/schedulers/step_lr.h>

#include "support/kernels/adam_reference.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing {
namespace {

constexpr int kSteps = 100;
constexpr double kRate = 1e-2;

struct ParityCase {
  double beta1, beta2, eps, weight_decay;
  bool amsgrad;
};

std::vector<ParityCase> parity_cases() {
  const std::vector<std::pair<double, double>> betas = {{0.9, 0.999}, {0.8, 0.95}, {0.0, 0.9}, {0.95, 0.0}};
  std::vector<ParityCase> cases;
  for (const auto& [beta1, beta2] : betas) {
    for (const double eps : {1e-8, 1e-2}) {
      for (const double decay : {0.0, 0.1}) {
        for (const bool amsgrad : {false, true}) cases.push_back({beta1, beta2, eps, decay, amsgrad});
      }
    }
  }
  return cases;
}

template <class Options>
Options options_for(const ParityCase& c) {
  return Options(kRate).betas({c.beta1, c.beta2}).eps(c.eps).weight_decay(c.weight_decay).amsgrad(c.amsgrad);
}

// Gradients of size 0.5 to 2 with random signs, so that no update is a quotient of two nearly vanished
// numbers.
void set_moderate_gradients(const std::vector<Tensor>& ours, const std::vector<Tensor>& theirs) {
  for (size_t i = 0; i < ours.size(); ++i) {
    const Tensor size = torch::rand(ours[i].sizes(), at::kDouble).mul(1.5).add(0.5);
    const Tensor sign = torch::randn(ours[i].sizes(), at::kDouble).sign();
    const Tensor gradient = size.mul(sign).to(at::kFloat);
    ours[i].mutable_grad() = gradient.to(ours[i].scalar_type());
    theirs[i].mutable_grad() = gradient.to(theirs[i].scalar_type());
  }
}

// With beta2 = 0 or 0.9 one update is at most lr * 4 here, so each parameter stays below
// |4| + 100 * lr * 4 = 8. Each of the two implementations rounds a parameter of that size once per step (half
// a unit in the last place, 2^-53 or 2^-24 relative) and computes the update with at most 16 roundings. Both
// added up over all steps:
double bound(double unit_roundoff) { return 2 * kSteps * unit_roundoff * (8 + 16 * kRate * 4); }
constexpr double kDoubleRoundoff = 0x1p-53, kFloatRoundoff = 0x1p-24;

template <class Fused>
double worst_parity(at::ScalarType dtype, const ParityCase& c) {
  auto ours = random_parameters({{3, 5}, {17}, {}}, dtype);
  auto theirs = clones(ours);
  Fused optimizer(ours, options_for<OptionsOf<Fused>>(c));
  PeerOf<Fused> peer(theirs, options_for<OptionsOf<PeerOf<Fused>>>(c));
  double worst = 0;
  for (int step = 0; step < kSteps; ++step) {
    set_moderate_gradients(ours, theirs);
    optimizer.step();
    peer.step();
    worst = std::max(worst, distance(ours, theirs));
  }
  for (size_t i = 0; i < ours.size(); ++i) {
    const auto &mine = state_of(optimizer, ours[i]), &torchs = state_of(peer, theirs[i]);
    if (mine.step() != torchs.step()) return HUGE_VAL;
    if (mine.max_exp_avg_sq().defined() != c.amsgrad) return HUGE_VAL;
    worst = std::max(worst, distance(mine.exp_avg(), torchs.exp_avg()));
    worst = std::max(worst, distance(mine.exp_avg_sq(), torchs.exp_avg_sq()));
    if (c.amsgrad) worst = std::max(worst, distance(mine.max_exp_avg_sq(), torchs.max_exp_avg_sq()));
  }
  return worst;
}

TEMPLATE_TEST_CASE("a fused optimizer follows torch's to rounding, whatever the options", "[fused_adam]",
                   FusedAdam, FusedAdamW) {
  torch::manual_seed(1);
  double worst_double = 0, worst_float = 0;
  for (const ParityCase& c : parity_cases()) {
    CAPTURE(c.beta1, c.beta2, c.eps, c.weight_decay, c.amsgrad);
    const double in_double = worst_parity<TestType>(at::kDouble, c);
    const double in_float = worst_parity<TestType>(at::kFloat, c);
    CHECK(in_double <= bound(kDoubleRoundoff));
    CHECK(in_float <= bound(kFloatRoundoff));
    worst_double = std::max(worst_double, in_double);
    worst_float = std::max(worst_float, in_float);
  }
  // A comparison of a thing with itself would be exact.
  CHECK(worst_double > 0);
  CHECK(worst_float > 0);
  INFO("worst " << worst_double / kDoubleRoundoff << " x 2^-53 and " << worst_float / kFloatRoundoff
                << " x 2^-24");
  SUCCEED();
}

TEMPLATE_TEST_CASE("a fused optimizer follows the restatement in double precision", "[fused_adam]", FusedAdam,
                   FusedAdamW) {
  torch::manual_seed(2);
  for (const ParityCase& c : parity_cases()) {
    for (const bool bias_correction : {true, false}) {
      CAPTURE(c.beta1, c.beta2, c.eps, c.weight_decay, c.amsgrad, bias_correction);
      const AdamRule rule = {
          kRate, c.beta1, c.beta2, c.eps, c.weight_decay, kIsDecoupled<TestType>, c.amsgrad, bias_correction};
      auto parameters = random_parameters({{41}}, at::kDouble);
      auto copies = clones(parameters);
      ReferenceAdam reference(rule, to_doubles(parameters[0]));
      TestType optimizer(parameters, options_for<OptionsOf<TestType>>(c).bias_correction(bias_correction));
      for (int step = 0; step < kSteps; ++step) {
        set_moderate_gradients(parameters, copies);
        reference.step(to_doubles(parameters[0].grad()));
        optimizer.step();
      }
      const Tensor expected = torch::tensor(reference.parameter, at::kDouble);
      CHECK(distance(parameters[0], expected) <= bound(kDoubleRoundoff));
      const auto& state = state_of(optimizer, parameters[0]);
      CHECK(state.step() == kSteps);
      CHECK(distance(state.exp_avg(), torch::tensor(reference.exp_avg, at::kDouble)) <= 1e-14);
      CHECK(distance(state.exp_avg_sq(), torch::tensor(reference.exp_avg_sq, at::kDouble)) <= 1e-14);
    }
  }
}

TEST_CASE("FusedAdamW follows at::_fused_adamw_", "[fused_adam]") {
  torch::manual_seed(3);
  for (const bool amsgrad : {false, true}) {
    auto ours = random_parameters({{64, 3}, {7}}, at::kFloat);
    auto theirs = clones(ours);
    std::vector<Tensor> exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps;
    for (const Tensor& parameter : theirs) {
      exp_avgs.push_back(torch::zeros_like(parameter));
      exp_avg_sqs.push_back(torch::zeros_like(parameter));
      if (amsgrad) max_exp_avg_sqs.push_back(torch::zeros_like(parameter));
      steps.push_back(torch::zeros({}, at::kFloat));
    }
    FusedAdamW optimizer(ours, FusedAdamWOptions(kRate).weight_decay(0.1).amsgrad(amsgrad));
    for (int step = 0; step < kSteps; ++step) {
      set_moderate_gradients(ours, theirs);
      optimizer.step();
      torch::NoGradGuard no_grad;
      std::vector<Tensor> gradients;
      for (size_t i = 0; i < theirs.size(); ++i) {
        gradients.push_back(theirs[i].grad());
        steps[i].add_(1);
      }
      at::_fused_adamw_(theirs, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, kRate, 0.9, 0.999,
                        0.1, 1e-8, amsgrad, false);
    }
    CHECK(distance(ours, theirs) <= bound(kFloatRoundoff));
    CHECK(distance(ours, theirs) > 0);
  }
}

// Three groups that differ in learning rate and decay, under a schedule.
template <class Optimizer>
std::vector<torch::optim::OptimizerParamGroup> three_groups(const std::vector<Tensor>& parameters) {
  using Options = OptionsOf<Optimizer>;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{parameters[0], parameters[1]},
                      std::make_unique<Options>(Options(0.05).weight_decay(0)));
  groups.emplace_back(
      std::vector<Tensor>{parameters[2]},
      std::make_unique<Options>(Options(0.002).weight_decay(0.3).betas({0.5, 0.7}).eps(1e-3)));
  groups.emplace_back(std::vector<Tensor>{parameters[3]});
  return groups;
}

TEMPLATE_TEST_CASE("groups keep their own options and follow a learning rate schedule", "[fused_adam]",
                   FusedAdam, FusedAdamW) {
  using Peer = PeerOf<TestType>;
  torch::manual_seed(4);
  auto ours = random_parameters({{4, 4}, {3}, {2, 5}, {9}}, at::kDouble);
  auto theirs = clones(ours);
  const auto start = clones(ours);
  TestType optimizer(three_groups<TestType>(ours), OptionsOf<TestType>(0.01).amsgrad(true));
  Peer peer(three_groups<Peer>(theirs), OptionsOf<Peer>(0.01).amsgrad(true));
  torch::optim::StepLR schedule(optimizer, 10, 0.5), peer_schedule(peer, 10, 0.5);
  for (int step = 0; step < kSteps; ++step) {
    set_moderate_gradients(ours, theirs);
    optimizer.step();
    peer.step();
    schedule.step();
    peer_schedule.step();
    for (size_t group = 0; group < 3; ++group) {
      REQUIRE(options_of(optimizer, group).lr() == options_of(peer, group).lr());
    }
    REQUIRE(distance(ours, theirs) <= bound(kDoubleRoundoff));
  }
  CHECK(options_of(optimizer, 0).lr() < 0.05 * 0.002);
  for (size_t i = 0; i < ours.size(); ++i) CHECK(distance(ours[i], start[i]) > 1e-3);
}

}  // namespace
}  // namespace pacer::testing
