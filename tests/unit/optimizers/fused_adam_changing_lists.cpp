// Lists of parameters that change between two steps: in memory, layout, dtype, size and number.
#include "support/catch.h"

#include "support/optimizers/twins.h"

namespace pacer::testing {
namespace {

// What users do to parameters between two steps. Each edit is applied to both twins alike.
struct ListEdit {
  const char* name;
  void (*apply)(const Tensor&);
};

TEST_CASE("a parameter changed between two steps keeps its state", "[fused_adam]") {
  torch::manual_seed(26);
  const std::vector<ListEdit> edits = {
      {"new memory", [](const Tensor& p) { p.set_data(p.detach().clone() * 2); }},
      {"other strides in new memory", [](const Tensor& p) { p.set_data(p.detach().t().contiguous().t()); }},
      {"other strides in the same memory", [](const Tensor& p) { p.set_data(p.detach().t()); }},
      {"transposed in place",
       [](const Tensor& p) {
         torch::NoGradGuard no_grad;
         p.t_();
       }},
      {"gaps",
       [](const Tensor& p) {
         p.set_data(torch::randn({4, 8}, p.options()).slice(1, 0, 8, 2).detach());
       }},
      {"no longer aligned",
       [](const Tensor& p) {
         p.set_data(torch::randn({17}, p.options()).slice(0, 1).view({4, 4}).detach());
       }},
      {"written in place",
       [](const Tensor& p) {
         torch::NoGradGuard no_grad;
         p.mul_(3);
       }},
      {"written through data()", [](const Tensor& p) { p.data().mul_(3); }},
      {"to the same dtype and back",
       [](const Tensor& p) {
         p.set_data(p.detach().to(at::kFloat));
         p.set_data(p.detach().to(at::kDouble));
       }},
  };
  for (const ListEdit& edit : edits) {
    CAPTURE(edit.name);
    Twins<FusedAdamW> twins(random_parameters({{4, 4}, {3}}, at::kDouble), 0.01);
    for (int round = 0; round < 3; ++round) {
      for (int step = 0; step < 2; ++step) twins.step_with_random_gradients();
      torch::manual_seed(27);
      edit.apply(twins.ours[0]);
      torch::manual_seed(27);
      edit.apply(twins.theirs[0]);
      CHECK(twins.apart() <= 1e-13);
    }
    CHECK(state_of(twins.optimizer, twins.ours[0]).step() == 6);
  }
}

TEST_CASE("a parameter may change its dtype between two steps", "[fused_adam]") {
  torch::manual_seed(28);
  for (const auto to : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    CAPTURE(to);
    Twins<FusedAdamW> twins(random_parameters({{4, 4}, {3}}, at::kFloat), 0.01);
    twins.step_with_random_gradients();
    // What Module::to does; torch's twin stays as it is and sees the same numbers.
    for (const Tensor& parameter : twins.ours) {
      parameter.set_data(parameter.detach().to(to));
      parameter.mutable_grad() = Tensor();
    }
    for (size_t i = 0; i < 2; ++i) twins.theirs[i].set_data(twins.ours[i].detach().to(at::kFloat));
    for (int step = 0; step < 3; ++step) {
      set_random_gradients(twins.ours, twins.theirs, at::kFloat);
      twins.step();
    }
    const double unit = to == at::kBFloat16 ? 0x1p-8 : to == at::kHalf ? 0x1p-11 : 1e-6;
    CHECK(twins.apart() <= 4 * unit);
    CHECK(twins.ours[0].scalar_type() == to);
    CHECK(state_of(twins.optimizer, twins.ours[0]).step() == 4);
  }
}

TEST_CASE("a parameter may shrink or grow together with its state", "[fused_adam]") {
  torch::manual_seed(29);
  Twins<FusedAdam> twins(random_parameters({{8, 3}, {5}}, at::kDouble), 0.01);
  twins.step_with_random_gradients();
  const auto cut = [](auto& optimizer, const Tensor& parameter) {
    auto& state = state_of(optimizer, parameter);
    parameter.set_data(parameter.detach().slice(0, 0, 5));  // same address
    parameter.mutable_grad() = Tensor();
    state.exp_avg(state.exp_avg().slice(0, 0, 5)).exp_avg_sq(state.exp_avg_sq().slice(0, 0, 5));
  };
  cut(twins.optimizer, twins.ours[0]);
  cut(twins.peer, twins.theirs[0]);
  for (int step = 0; step < 2; ++step) twins.step_with_random_gradients();
  CHECK(twins.apart() <= 1e-14);

  // Without its state it no longer fits.
  set_random_gradients(twins.ours);
  twins.ours[0].set_data(twins.ours[0].detach().slice(0, 0, 2));
  twins.ours[0].mutable_grad() = torch::ones({2, 3}, at::kDouble);
  CHECK(unless_refused(twins.optimizer, {"parameter 0 of group 0", "exp_avg"},
                       [&] { twins.optimizer.step(); }) == "");
  CHECK(twins.ours[0].sizes() == at::IntArrayRef({2, 3}));
}

TEST_CASE("a parameter taken out of the list stays as it is", "[fused_adam]") {
  for (const size_t leaving : {0, 1, 2}) {
    CAPTURE(leaving);
    auto parameters = random_parameters({{3}, {4}, {5}}, at::kDouble);
    FusedAdamW optimizer(parameters, 0.1);
    set_random_gradients(parameters);
    optimizer.step();
    auto& listed = optimizer.param_groups()[0].params();
    listed.erase(listed.begin() + static_cast<int64_t>(leaving));
    const auto before = clones(parameters);
    optimizer.step();  // its gradient is still there
    for (size_t i = 0; i < 3; ++i) CHECK(same_bits(before[i], parameters[i]) == (i == leaving));
  }
}

TEST_CASE("parameters may join and leave at any time", "[fused_adam]") {
  torch::manual_seed(30);
  Twins<FusedAdam> twins(random_parameters({{3}, {4}}, at::kDouble), 0.01);
  twins.step_with_random_gradients();
  twins.add(torch::randn({2, 2}, at::kDouble).requires_grad_());
  for (int step = 0; step < 2; ++step) twins.step_with_random_gradients();
  for (auto* params : {&twins.optimizer.param_groups()[0].params(), &twins.peer.param_groups()[0].params()}) {
    params->erase(params->begin());
  }
  for (int step = 0; step < 2; ++step) twins.step_with_random_gradients();
  CHECK(twins.apart() <= 1e-14);
  CHECK(state_of(twins.optimizer, twins.ours[0]).step() == 3);
  CHECK(state_of(twins.optimizer, twins.ours[1]).step() == 5);
  CHECK(state_of(twins.optimizer, twins.ours[2]).step() == 4);
}

}  // namespace
}  // namespace pacer::testing
