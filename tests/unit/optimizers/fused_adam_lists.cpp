// Odd lists of parameters and gradients: every shape, stride and count gives torch's result.
#include "support/catch.h"

#include <ATen/ops/_efficientzerotensor.h>
#include <ATen/ops/_neg_view.h>

#include "support/optimizers/twins.h"

namespace pacer::testing {
namespace {

TEMPLATE_TEST_CASE("a list of any length steps like torch's", "[fused_adam]", FusedAdam, FusedAdamW) {
  torch::manual_seed(21);
  for (const size_t count : {0, 1, 2, 31, 32, 33, 64, 100, 399, 400}) {
    CAPTURE(count);
    std::vector<std::vector<int64_t>> shapes;
    for (size_t i = 0; i < count; ++i) shapes.push_back({static_cast<int64_t>(1 + i * 7 % 130)});
    Twins<TestType> twins(random_parameters(shapes, at::kDouble), 0.01);
    for (int step = 0; step < 2; ++step) twins.step_with_random_gradients();
    CHECK(twins.apart() <= 1e-14);
  }
}

TEST_CASE("an empty tensor may stand in any slot", "[fused_adam]") {
  torch::manual_seed(22);
  const std::vector<std::vector<int64_t>> empty_shapes = {{0}, {3, 0, 2}, {0, 5}};
  for (const bool check : {false, true}) {
    for (int64_t mask = 1; mask < 64; ++mask) {
      std::vector<std::vector<int64_t>> shapes;
      for (int64_t i = 0; i < 6; ++i) {
        shapes.push_back((mask >> i) & 1 ? empty_shapes[static_cast<size_t>(mask + i) % 3]
                                         : std::vector<int64_t>{i + 1});
      }
      CAPTURE(mask);
      Twins<FusedAdamW> twins(random_parameters(shapes, at::kDouble), 0.01);
      options_of(twins.optimizer).finite_check(check);
      for (int step = 0; step < 2; ++step) twins.step_with_random_gradients();
      CHECK(twins.apart() <= 1e-14);
      CHECK(twins.optimizer.skipped_steps() == 0);
    }
  }
}

// Leaves with every kind of memory layout that has one location per element.
std::vector<Tensor> odd_layouts(at::ScalarType dtype) {
  const auto random = [&](std::vector<int64_t> shape) { return torch::randn(shape, at::kDouble).to(dtype); };
  const Tensor interleaved = random({6, 8});
  std::vector<Tensor> parameters = {
      random({}),                                                       // one number
      random({1}),                                                      // one element
      random({7, 3}).t(),                                               // transposed
      random({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast),  // channels last
      random({2, 3, 2, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast3d),
      random({3, 4, 5}).permute({2, 0, 1}),                    // permuted
      random({10}).slice(0, 0, 10, 3),                         // gaps
      random({6, 8}).slice(1, 2, 5),                           // rows with gaps
      random({9, 7}).slice(0, 1, 8, 2).slice(1, 0, 7, 3).t(),  // gaps in both, transposed
      random({41}).slice(0, 1),                                // not aligned
      random({5, 1, 3}).expand({5, 1, 3}),                     // expanded in nothing
      torch::as_strided(random({64}), {1, 4}, {17, 2}, 3),     // a stride that is never used
      random({3, 0, 2}).transpose(0, 2),                       // empty
      random({33000}),                                         // longer than one tile
      random({300, 129}).t(),                                  // the same, transposed
  };
  for (Tensor& parameter : parameters) parameter = parameter.detach().requires_grad_();
  return parameters;
}

TEMPLATE_TEST_CASE("parameters of any layout step like torch's", "[fused_adam]", FusedAdam, FusedAdamW) {
  torch::manual_seed(23);
  for (const bool check : {false, true}) {
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      const auto layouts = odd_layouts(dtype);
      for (size_t i = 0; i < layouts.size(); ++i) {  // alone
        CAPTURE(i, dtype, check);
        Twins<TestType> twins({layouts[i]}, 0.01, Twins<TestType>::kKeepOurs);
        options_of(twins.optimizer).finite_check(check);
        for (int step = 0; step < 3; ++step) twins.step_with_random_gradients();
        CHECK(twins.apart() <= (dtype == at::kDouble ? 1e-14 : 4e-6));
        CHECK(twins.ours[0].strides() == layouts[i].strides());
      }
      Twins<TestType> twins(odd_layouts(dtype), 0.01, Twins<TestType>::kKeepOurs);  // together
      for (int step = 0; step < 3; ++step) twins.step_with_random_gradients();
      CHECK(twins.apart() <= (dtype == at::kDouble ? 1e-14 : 4e-6));
    }
  }
}

TEST_CASE("memory between the elements of a parameter stays as it is", "[fused_adam]") {
  const Tensor memory = torch::arange(48, at::kFloat);
  const Tensor parameter = memory.view({6, 8}).slice(1, 2, 5).slice(0, 0, 6, 2).detach().requires_grad_();
  FusedAdamW optimizer({parameter}, FusedAdamWOptions(0.5));
  for (int step = 0; step < 3; ++step) {
    set_random_gradients({parameter});
    optimizer.step();
  }
  const Tensor now = memory.view({6, 8});
  CHECK(now.slice(1, 2, 5).slice(0, 0, 6, 2).equal(parameter));
  const Tensor untouched = torch::ones({6, 8}, at::kBool);
  untouched.slice(1, 2, 5).slice(0, 0, 6, 2).fill_(false);
  CHECK(now.masked_select(untouched).equal(
      torch::arange(48, at::kFloat).view({6, 8}).masked_select(untouched)));
}

TEST_CASE("gradients of any layout are read as torch reads them", "[fused_adam]") {
  torch::manual_seed(24);
  const auto random = [] { return torch::randn({6, 4}, at::kDouble); };
  const std::vector<Tensor> gradients = {
      torch::randn({4, 6}, at::kDouble).t(),                             // other strides than the parameter
      torch::randn({6, 9}, at::kDouble).slice(1, 0, 8, 2),               // gaps
      torch::randn({1, 4}, at::kDouble).expand({6, 4}),                  // expanded rows
      torch::randn({}, at::kDouble).expand({6, 4}),                      // one number for all
      torch::randn({25}, at::kDouble).slice(0, 1).view({6, 4}),          // not aligned
      at::_neg_view(random()),                                           // negative in name only
      at::_efficientzerotensor({6, 4}, at::TensorOptions(at::kDouble)),  // zero without memory
      random().requires_grad_() * 2,                                     // with a graph (create_graph)
  };
  for (const bool check : {false, true}) {
    for (const bool transposed : {false, true}) {
      for (size_t i = 0; i < gradients.size(); ++i) {
        CAPTURE(i, transposed, check);
        const Tensor parameter = transposed ? torch::randn({4, 6}, at::kDouble).t() : random();
        Twins<FusedAdamW> twins(
            {parameter.detach().requires_grad_(), torch::randn({3}, at::kDouble).requires_grad_()}, 0.01);
        options_of(twins.optimizer).finite_check(check);
        twins.step_with_random_gradients();
        const Tensor before = gradients[i].clone();
        for (int step = 0; step < 2; ++step) {
          twins.ours[0].mutable_grad() = gradients[i];
          twins.theirs[0].mutable_grad() = gradients[i];
          twins.step();
        }
        CHECK(twins.apart() <= 1e-14);
        CHECK(gradients[i].equal(before));
        const auto& state = state_of(twins.optimizer, twins.ours[0]);
        CHECK(state.step() == 3);
        CHECK_FALSE(state.exp_avg().requires_grad());
        CHECK_FALSE(state.exp_avg_sq().requires_grad());
      }
    }
  }
}

TEST_CASE("two parameters may have one gradient tensor", "[fused_adam]") {
  Twins<FusedAdam> twins(random_parameters({{3, 4}, {3, 4}}, at::kDouble), 0.01);
  const Tensor gradient = torch::randn({3, 4}, at::kDouble);
  for (size_t i = 0; i < 2; ++i) twins.ours[i].mutable_grad() = twins.theirs[i].mutable_grad() = gradient;
  for (int step = 0; step < 3; ++step) twins.step();
  CHECK(twins.apart() <= 1e-14);
}

TEMPLATE_TEST_CASE("each parameter counts its own steps when gradients are missing at random", "[fused_adam]",
                   FusedAdam, FusedAdamW) {
  torch::manual_seed(25);
  Twins<TestType> twins(random_parameters({{3}, {4, 2}, {}, {5}, {17}, {2}, {0}, {9}}, at::kDouble), 0.01);
  for (int step = 0; step < 60; ++step) {
    const Tensor missing = torch::rand({8}).lt(step % 20 < 10 ? 0.2 : 0.8);
    set_random_gradients(twins.ours, twins.theirs);
    for (size_t i = 0; i < 8; ++i) {
      if (missing[static_cast<int64_t>(i)].item<bool>()) twins.clear_gradient(i);
    }
    twins.step();
    REQUIRE(twins.apart() <= 1e-13);
  }
  for (size_t i = 0; i < 8; ++i) {
    CHECK(state_of(twins.optimizer, twins.ours[i]).step() == state_of(twins.peer, twins.theirs[i]).step());
  }
}

TEST_CASE("a step without any gradient creates nothing and changes nothing", "[fused_adam]") {
  const auto parameters = random_parameters({{3}, {4}}, at::kFloat);
  FusedAdamW optimizer(parameters, FusedAdamWOptions(0.1).weight_decay(0.5));
  const auto before = snapshot(optimizer);
  optimizer.step();
  CHECK(difference(before, snapshot(optimizer)) == "");
  CHECK(optimizer.state().empty());
}

// Interleaved parameters overlap as ranges but not as elements: torch's result, or refused.
TEST_CASE("interleaved parameters give torch's result or are refused", "[fused_adam]") {
  const Tensor memory = torch::randn({4, 6}, at::kDouble);
  Twins<FusedAdamW> twins(
      {memory.slice(1, 0, 3).detach().requires_grad_(), memory.slice(1, 3, 6).detach().requires_grad_()},
      0.01, Twins<FusedAdamW>::kKeepOurs);
  set_random_gradients(twins.ours, twins.theirs);
  const std::string message =
      unless_refused(twins.optimizer, {"0 of group 0", "1 of group 0"}, [&] { twins.optimizer.step(); });
  if (message == "<no exception>") {
    twins.peer.step();
    CHECK(twins.apart() <= 1e-14);
  } else {
    CHECK(message == "");
  }
}

TEST_CASE("neighbours in one flat buffer are fine", "[fused_adam]") {
  torch::manual_seed(31);
  const Tensor memory = torch::randn({20}, at::kDouble), gradients = torch::randn({20}, at::kDouble);
  std::vector<Tensor> parameters;
  for (int64_t i = 0; i < 4; ++i) {
    parameters.push_back(memory.slice(0, 5 * i, 5 * i + 5).detach().requires_grad_());
    parameters.back().mutable_grad() = gradients.slice(0, 5 * i, 5 * i + 5);
  }
  Twins<FusedAdamW> twins(parameters, 0.01, Twins<FusedAdamW>::kKeepOurs);
  for (size_t i = 0; i < 4; ++i) twins.theirs[i].mutable_grad() = parameters[i].grad();
  for (int step = 0; step < 3; ++step) twins.step();
  CHECK(twins.apart() <= 1e-14);
}

}  // namespace
}  // namespace pacer::testing
