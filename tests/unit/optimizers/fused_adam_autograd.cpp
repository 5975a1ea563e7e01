// A step as autograd and other threads see it: a visible in-place change of the parameters, outside of every
// graph.
#include "support/catch.h"

#include <thread>

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>

#include "support/optimizers/twins.h"

namespace pacer::testing {
namespace {

TEMPLATE_TEST_CASE("a step bumps the version of each parameter it changes, and of no other", "[fused_adam]",
                   FusedAdam, FusedAdamW) {
  const Tensor gaps = torch::randn({6, 4}).slice(1, 0, 4, 2).detach().requires_grad_();
  std::vector<Tensor> parameters = random_parameters({{3}, {4, 2}}, at::kFloat);
  parameters.push_back(gaps);
  parameters.push_back(random_parameters({{5}}, at::kBFloat16)[0]);
  TestType optimizer(parameters);
  for (int step = 0; step < 3; ++step) {
    set_random_gradients(parameters);
    parameters[1].mutable_grad() = Tensor();
    std::vector<int64_t> before;
    for (const Tensor& p : parameters) before.push_back(p._version());
    optimizer.step();
    for (size_t i = 0; i < parameters.size(); ++i) CHECK((parameters[i]._version() > before[i]) == (i != 1));
  }
}

TEMPLATE_TEST_CASE("backward through a graph from before the step is refused, as with torch", "[fused_adam]",
                   FusedAdam, FusedAdamW, torch::optim::Adam, torch::optim::AdamW) {
  const Tensor weight = torch::randn({4}).requires_grad_();
  TestType optimizer(std::vector<Tensor>{weight});
  const Tensor loss = (weight * weight).sum();
  loss.backward({}, /*retain_graph=*/true);
  optimizer.step();
  CHECK_THROWS_AS(loss.backward(), c10::Error);
}

TEST_CASE("a step records no graph and leaves parameters leaves", "[fused_adam]") {
  REQUIRE(torch::GradMode::is_enabled());
  const Tensor gaps = torch::randn({6, 4}, at::kDouble).slice(1, 0, 4, 2).detach().requires_grad_();
  Twins<FusedAdamW> twins({torch::randn({4, 4}, at::kDouble).requires_grad_(), gaps}, 0.1,
                          Twins<FusedAdamW>::kKeepOurs);
  for (int step = 0; step < 3; ++step) {
    for (auto* list : {&twins.ours, &twins.theirs}) {
      Tensor loss = torch::zeros({}, at::kDouble);
      for (const Tensor& p : *list) {
        p.mutable_grad() = Tensor();
        loss = loss + (p * p * p).sum();
      }
      loss.backward({}, /*retain_graph=*/false,
                    /*create_graph=*/true);  // gradients that have a graph themselves
    }
    twins.step();
    for (const Tensor& p : twins.ours) {
      CHECK(p.is_leaf());
      CHECK(p.requires_grad());
      CHECK(p.grad_fn() == nullptr);
      CHECK_FALSE(state_of(twins.optimizer, p).exp_avg().requires_grad());
      CHECK_FALSE(state_of(twins.optimizer, p).exp_avg_sq().requires_grad());
      CHECK(p.grad().requires_grad());
    }
  }
  CHECK(twins.apart() <= 1e-13);
  CHECK(torch::GradMode::is_enabled());
  for (auto* list : {&twins.ours, &twins.theirs}) {
    for (const Tensor& p : *list) p.mutable_grad() = Tensor();  // which has a graph that has the parameter
  }
}

TEST_CASE("a closure that throws changes nothing and leaves gradients switched as they were",
          "[fused_adam]") {
  Twins<FusedAdam> twins(random_parameters({{4}}, at::kFloat), 0.1);
  twins.step_with_random_gradients();
  const auto before = snapshot(twins.optimizer);
  for (const bool enabled : {true, false}) {
    const at::AutoGradMode mode(enabled);
    CHECK_THROWS_AS(twins.optimizer.step([]() -> Tensor { throw std::range_error("user code"); }),
                    std::range_error);
    CHECK(torch::GradMode::is_enabled() == enabled);
  }
  CHECK(difference(before, snapshot(twins.optimizer)) == "");
}

TEST_CASE("gradients are never written", "[fused_adam]") {
  const auto parameters = random_parameters({{40}, {7, 3}}, at::kFloat);
  for (const bool check : {false, true}) {
    FusedAdam optimizer(parameters, FusedAdamOptions(0.1).weight_decay(0.5).finite_check(check));
    set_random_gradients(parameters);
    const std::vector<Tensor> before = {copy_of(parameters[0].grad()), copy_of(parameters[1].grad())};
    const int64_t version = parameters[0].grad()._version();
    for (int step = 0; step < 3; ++step) optimizer.step();
    CHECK(same_bits(before, {parameters[0].grad(), parameters[1].grad()}));
    CHECK(parameters[0].grad()._version() == version);
  }
}

TEST_CASE("models may be trained in several threads at once, to the same bits as one after the other",
          "[fused_adam]") {
  const auto train = [](uint64_t seed) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    std::vector<Tensor> parameters;
    for (const int64_t size : {5, 20000, 300}) {
      parameters.push_back(torch::randn({size}, generator).requires_grad_());
    }
    FusedAdamW optimizer(parameters, FusedAdamWOptions(0.01).finite_check(true));
    for (int step = 0; step < 30; ++step) {
      for (const Tensor& p : parameters) p.mutable_grad() = torch::randn(p.sizes(), generator);
      if (step % 7 == 3) parameters[0].grad().fill_(HUGE_VAL);
      optimizer.step();
    }
    return parameters;
  };
  std::vector<std::vector<Tensor>> together(4);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 4; ++i) threads.emplace_back([&, i] { together[i] = train(i); });
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < 4; ++i) CHECK(same_bits(together[i], train(i)));
}

TEST_CASE("the result does not depend on the number of threads", "[fused_adam]") {
  torch::manual_seed(71);
  std::vector<Tensor> first;
  for (const int count : {1, 2, 3, 7}) {
    at::set_num_threads(count);
    torch::manual_seed(72);
    auto parameters = random_parameters({{100003}, {1}, {40, 999}, {0}}, at::kBFloat16);
    FusedAdamW optimizer(parameters, FusedAdamWOptions(0.01)
                                         .finite_check(true)
                                         .master_weights(MasterWeights::none)
                                         .rounding(Rounding::stochastic));
    for (int step = 0; step < 3; ++step) {
      set_random_gradients(parameters);
      optimizer.step();
    }
    if (first.empty()) first = parameters;
    CHECK(same_bits(first, parameters));
  }
  at::set_num_threads(1);
}

}  // namespace
}  // namespace pacer::testing
