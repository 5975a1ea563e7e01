// The finite check: one NaN or infinity anywhere in the gradients, and the step changes nothing, to the bit.
#include "support/catch.h"

#include <limits>

#include "support/optimizers/twins.h"

namespace pacer::testing {
namespace {

constexpr double kBadValues[] = {std::numeric_limits<double>::quiet_NaN(),
                                 std::numeric_limits<double>::infinity(),
                                 -std::numeric_limits<double>::infinity()};

// The middle one is longer than two units of the norm; the others are shorter than one vector.
std::vector<Tensor> parameters_of_many_sizes(at::ScalarType dtype) {
  return random_parameters({{5}, {70001}, {7, 3}, {0}, {1}}, dtype);
}
const std::vector<size_t> kCheckedParameters = {0, 1, 2, 4};

FusedAdamWOptions checked_options(const Mode& mode) {
  return with_mode(FusedAdamWOptions(0.01).weight_decay(0.1).amsgrad(true).finite_check(true).seed(5), mode);
}

TEST_CASE("N2: a non-finite gradient element changes nothing, wherever it is and in every mode",
          "[fused_adam]") {
  for (const Mode& mode : all_modes()) {
    torch::manual_seed(41);
    auto parameters = parameters_of_many_sizes(mode.dtype);
    auto copies = clones(parameters);
    FusedAdamW optimizer(parameters, checked_options(mode)), unbothered(copies, checked_options(mode));
    set_random_gradients(parameters, copies);
    optimizer.step();
    unbothered.step();
    const auto before = snapshot(optimizer);
    int64_t skipped = 0;
    for (const size_t i : kCheckedParameters) {
      const int64_t last = parameters[i].numel() - 1;
      for (const int64_t element : {int64_t{0}, last / 2, last}) {
        for (const double bad : kBadValues) {
          CAPTURE(mode.name, i, element, bad);
          const Tensor flat = parameters[i].grad().view({-1});
          const Tensor good = flat[element].clone();
          flat[element].fill_(bad);
          optimizer.step();
          flat[element].copy_(good);
          REQUIRE(optimizer.skipped_steps() == ++skipped);
          REQUIRE(difference(before, snapshot(optimizer)) == "");
        }
      }
    }
    // And on as if nothing had happened.
    for (int step = 0; step < 2; ++step) {
      set_random_gradients(parameters, copies);
      optimizer.step();
      unbothered.step();
      CHECK(difference(snapshot(unbothered), snapshot(optimizer)) == "");
    }
    CHECK(unbothered.skipped_steps() == 0);
    CHECK(optimizer.skipped_steps() == skipped);
  }
}

TEST_CASE("N2: a first step may be skipped too", "[fused_adam]") {
  for (const Mode& mode : all_modes()) {
    CAPTURE(mode.name);
    torch::manual_seed(42);
    auto parameters = random_parameters({{5}, {6}}, mode.dtype);
    auto copies = clones(parameters);
    const auto start = clones(parameters);
    FusedAdamW optimizer(parameters, checked_options(mode)), unbothered(copies, checked_options(mode));
    set_random_gradients(parameters);
    parameters[1].grad()[3] = kBadValues[0];
    optimizer.step();
    CHECK(same_bits(start, parameters));
    CHECK(optimizer.skipped_steps() == 1);
    // A state without a step is one, too.
    const auto others = clones(parameters);
    FusedAdamW loaded(others, checked_options(mode));
    loaded.import_state(optimizer.export_state());
    set_random_gradients(parameters, copies);
    for (size_t i = 0; i < others.size(); ++i) others[i].mutable_grad() = parameters[i].grad().clone();
    for (FusedAdamW* each : {&optimizer, &unbothered, &loaded}) each->step();
    CHECK(difference(snapshot(unbothered), snapshot(optimizer)) == "");
    CHECK(difference(snapshot(unbothered), snapshot(loaded)) == "");
  }
}

TEST_CASE("N2: all parameters and groups are skipped together, those without a gradient count as before",
          "[fused_adam]") {
  auto parameters = random_parameters({{5}, {6}, {7}}, at::kFloat);
  const auto group = [&](size_t i, double rate) {
    return torch::optim::OptimizerParamGroup(
        {parameters[i]}, std::make_unique<FusedAdamOptions>(FusedAdamOptions(rate).finite_check(true)));
  };
  FusedAdam optimizer({group(0, 0.1), group(1, 0.2), group(2, 0.3)});
  set_random_gradients(parameters);
  optimizer.step();
  parameters[1].mutable_grad() = Tensor();
  parameters[2].grad()[6] = kBadValues[1];
  const auto before = snapshot(optimizer);
  optimizer.step();
  CHECK(difference(before, snapshot(optimizer)) == "");
  parameters[2].grad()[6] = 1;
  optimizer.step();
  CHECK(state_of(optimizer, parameters[0]).step() == 2);
  CHECK(state_of(optimizer, parameters[1]).step() == 1);
  CHECK(state_of(optimizer, parameters[2]).step() == 2);
  CHECK(optimizer.skipped_steps() == 1);
}

TEST_CASE("the finite check reads gradients of odd layout as they are", "[fused_adam]") {
  torch::manual_seed(43);
  const Tensor parameter = torch::randn({6, 4}, at::kFloat).slice(1, 0, 4, 2).t().detach().requires_grad_();
  FusedAdamW optimizer({parameter}, FusedAdamWOptions(0.1).finite_check(true));
  // Bad numbers in the memory between the elements are not part of the gradient.
  const Tensor memory = torch::full({6, 4}, kBadValues[0], at::kFloat);
  const Tensor gradient = memory.slice(1, 0, 4, 2).t();
  gradient.fill_(0.5);
  parameter.mutable_grad() = gradient;
  optimizer.step();
  CHECK(optimizer.skipped_steps() == 0);
  CHECK(state_of(optimizer, parameter).step() == 1);
  gradient[1][5] = kBadValues[2];
  const auto before = snapshot(optimizer);
  optimizer.step();
  CHECK(optimizer.skipped_steps() == 1);
  CHECK(difference(before, snapshot(optimizer)) == "");
}

TEST_CASE("large finite gradients are not taken for infinite ones", "[fused_adam]") {
  const std::pair<at::ScalarType, double> large[] = {
      {at::kDouble, 1e150}, {at::kFloat, 1e17}, {at::kBFloat16, 1e17}, {at::kHalf, 65504}};
  for (const auto& [dtype, value] : large) {
    CAPTURE(dtype);
    const auto parameters = random_parameters({{300}}, dtype);
    FusedAdamW optimizer(parameters, FusedAdamWOptions(0.1).finite_check(true));
    parameters[0].mutable_grad() = torch::full_like(parameters[0], value);
    optimizer.step();
    CHECK(optimizer.skipped_steps() == 0);
    CHECK(state_of(optimizer, parameters[0]).step() == 1);
    CHECK(parameters[0].isfinite().all().item<bool>());
  }
}

TEST_CASE("a parameter that is not finite does not stop the step", "[fused_adam]") {
  Twins<FusedAdamW> twins(random_parameters({{5}, {6}}, at::kDouble), 0.1);
  options_of(twins.optimizer).finite_check(true);
  for (const auto* list : {&twins.ours, &twins.theirs}) {
    torch::NoGradGuard no_grad;
    (*list)[0][2].fill_(kBadValues[0]);
  }
  twins.step_with_random_gradients();
  CHECK(twins.optimizer.skipped_steps() == 0);
  CHECK(distance(twins.ours[1], twins.theirs[1]) <= 1e-14);
  CHECK(count_true(twins.ours[0].isnan()) == 1);
  CHECK(twins.ours[0].isnan()[2].item<bool>());
}

TEMPLATE_TEST_CASE("without the check a non-finite gradient does what it does in torch", "[fused_adam]",
                   FusedAdam, FusedAdamW) {
  torch::manual_seed(44);
  for (const double bad : kBadValues) {
    Twins<TestType> twins(random_parameters({{5}, {300}}, at::kDouble), 0.1);
    twins.step_with_random_gradients();
    set_random_gradients(twins.ours, twins.theirs);
    twins.ours[1].grad()[200] = bad;
    twins.theirs[1].grad()[200] = bad;
    for (int step = 0; step < 2; ++step) twins.step();
    CHECK(twins.optimizer.skipped_steps() == 0);
    CHECK(distance(twins.ours[0], twins.theirs[0]) <= 1e-14);
    CHECK(twins.ours[1].isnan().equal(twins.theirs[1].isnan()));
    CHECK(count_true(twins.ours[1].isnan()) == 1);
    CHECK(distance(twins.ours[1].nan_to_num(), twins.theirs[1].nan_to_num()) <= 1e-14);
    CHECK(state_of(twins.optimizer, twins.ours[1]).step() == 3);
  }
}

}  // namespace
}  // namespace pacer::testing
