// What a Session owns between two calls: the gradients of its optimizer's parameters. What others leave there
// or change is cleared or said, on one rank; tests/unit/parallel/rank_gradients.cpp has several.
#include <memory>

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <pacer/pacer.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/message_of.h"
#include "support/optimizers/optimizers.h"
#include "support/session/mistakes.h"
#include "support/session/two_layers.h"

namespace pacer::testing::session_gradients {
namespace {

using torch::optim::SGD;
using torch::optim::SGDOptions;

// A model of two layers and a loop in parts.
template <class O>
struct Loop {
  explicit Loop(O& its_optimizer, torch::nn::Sequential its_model)
      : model(std::move(its_model)), optimizer(its_optimizer), session(model, optimizer) {}
  Tensor forward() {
    auto [x] = session.begin(inputs);
    return model->forward(x).square().mean();
  }
  void micro_step() {
    session.backward(forward());
    session.step();
  }
  torch::nn::Sequential model;
  O& optimizer;
  Session session;
  Tensor inputs = batch_of(0, 3);
};

}  // namespace

TEST_CASE("an optimizer whose step fails once gets the same gradient again", "[session][gradients]") {
  for (const bool clips : {false, true}) {
    const auto train = [&](bool fails) {
      auto model = two_layers();
      FailingSgd optimizer(model->parameters(), SGDOptions(0.5));
      Loop<FailingSgd> loop(optimizer, model);
      loop.session.use(GradientAccumulation(4));
      if (clips) loop.session.use(GradientClipping(0.05));
      for (int i = 0; i < 3; ++i) loop.micro_step();
      loop.session.backward(loop.forward());
      optimizer.fails = fails;
      if (fails) CHECK(contains(message_of([&] { loop.session.step(); }), "no memory is left"));
      CHECK(loop.session.step());
      CHECK(loop.session.progress().step == 1);
      for (int i = 0; i < 4; ++i) loop.micro_step();
      loop.session.finish();
      return model;
    };
    CHECK(same_bits(train(true)->parameters(), train(false)->parameters()));
  }
}

// LibTorch's SGD writes past the versions of its parameters, so that nobody can see it.
TEMPLATE_TEST_CASE("the optimizer's step between backward and step is said", "[session][gradients]",
                   torch::optim::AdamW, FusedAdamW) {
  const auto options = [] {
    if constexpr (std::is_same_v<TestType, FusedAdamW>) {
      return FusedAdamWOptions(0.1);
    } else {
      return torch::optim::AdamWOptions(0.1);
    }
  };
  const auto heard = [&](int64_t micro_steps, const std::function<void(Loop<TestType>&)>& f) {
    auto model = two_layers();
    TestType optimizer(model->parameters(), options());
    Loop<TestType> loop(optimizer, model);
    loop.session.use(GradientAccumulation(micro_steps));
    return heard_of([&] {
      for (int i = 0; i < 4; ++i) f(loop);
      loop.session.finish();
    });
  };
  for (const int64_t micro_steps : {1, 2}) {
    const std::string message = heard(micro_steps, [](Loop<TestType>& loop) {
      loop.session.backward(loop.forward());
      loop.optimizer.step();
      loop.session.step();
    });
    CHECK(fault_of(message, {"between Session::backward and Session::step", "delete it"}) == "");
    CHECK(message.find("delete it", message.find("delete it") + 1) == std::string::npos);  // once
    CHECK(heard(micro_steps, [](Loop<TestType>& loop) { loop.micro_step(); }) == "");
  }
  // Behind a micro-step that is not the window's last, too.
  CHECK(fault_of(heard(2,
                       [](Loop<TestType>& loop) {
                         loop.micro_step();
                         loop.optimizer.step();
                       }),
                 {"delete it"}) == "");
  // Some of the parameters may be changed by hand.
  CHECK(heard(1, [](Loop<TestType>& loop) {
          loop.session.backward(loop.forward());
          const at::NoGradGuard no_grad;
          loop.model->parameters()[0].clamp_(-1, 1);
          loop.session.step();
        }) == "");
}

TEST_CASE("a backward beside the Session's is said, and does not count twice", "[session][gradients]") {
  auto model = two_layers(), twin = two_layers();
  SGD optimizer(model->parameters(), SGDOptions(0.1)), of_twin(twin->parameters(), SGDOptions(0.1));
  Loop<SGD> loop(optimizer, model), of(of_twin, twin);
  const std::string before = heard_of([&] {
    for (int i = 0; i < 2; ++i) {
      const Tensor loss = loop.forward();
      model->forward(loop.inputs).square().mean().backward();
      loop.session.backward(loss);
      loop.session.step();
    }
  });
  CHECK(fault_of(before, {"0.weight", "was cleared"}) == "");
  for (int i = 0; i < 2; ++i) of.micro_step();
  CHECK(same_bits(model->parameters(), twin->parameters()));

  const std::vector<Tensor> values = clones(model->parameters());
  loop.session.backward(loop.forward());
  model[1]->as<torch::nn::Linear>()->forward(torch::ones({1, 4})).sum().backward();
  for (int i = 0; i < 2; ++i) {
    const std::string message = message_of([&] { loop.session.step(); });
    CHECK(fault_of(message, {"parameter 1.", "not this Session's", "sum of all losses"}) == "");
  }
  CHECK(same_bits(values, model->parameters()));
}

TEST_CASE("what a user writes to gradients before step is what the step takes", "[session][gradients]") {
  auto model = two_layers(), twin = two_layers();
  SGD optimizer(model->parameters(), SGDOptions(0.1)), of_twin(twin->parameters(), SGDOptions(0.05));
  Loop<SGD> loop(optimizer, model), of(of_twin, twin);
  CHECK(heard_of([&] {
          for (int i = 0; i < 3; ++i) {
            loop.session.backward(loop.forward());
            for (const Tensor& parameter : model->parameters()) parameter.grad().mul_(0.5);
            loop.session.step();
            of.micro_step();
          }
        }) == "");
  for (size_t i = 0; i < 4; ++i) {
    CHECK(at::allclose(model->parameters()[i], twin->parameters()[i], 1e-6, 1e-7));
  }
}

TEST_CASE("a warm-up pass leaves no gradient on parameters outside of the model", "[session][gradients]") {
  const auto train = [](bool warms_up) {
    auto model = two_layers();
    Tensor scale = torch::ones({2}).requires_grad_();
    std::vector<Tensor> parameters = model->parameters();
    parameters.push_back(scale);
    SGD optimizer(parameters, SGDOptions(0.1));
    const CapturedStderr quiet;  // a parameter outside of the model
    Session session(*model, optimizer);
    if (warms_up) {
      session.prewarm([&] { return (model->forward(batch_of(0, 3)) * scale * 100).square().mean(); });
      CHECK_FALSE(scale.grad().defined());
    }
    auto [x] = session.begin(batch_of(0, 3));
    session.backward((model->forward(x) * scale).square().mean());
    session.step();
    session.finish();
    return scale.detach().clone();
  };
  const Tensor with = train(true);
  CHECK_FALSE(same_bits(with, torch::ones({2})));
  CHECK(same_bits(with, train(false)));
  // A gradient that was there before is there afterwards.
  auto model = two_layers();
  Tensor scale = torch::ones({2}).requires_grad_();
  std::vector<Tensor> parameters = model->parameters();
  parameters.push_back(scale);
  SGD optimizer(parameters, SGDOptions(0.1));
  const CapturedStderr quiet;
  Session session(*model, optimizer);
  const Tensor before = torch::full({2}, 3.0F);
  scale.mutable_grad() = before;
  session.prewarm([&] { return (model->forward(batch_of(0, 3)) * scale).sum(); });
  CHECK(scale.grad().is_same(before));
}

TEST_CASE("a parameter that joins begins with its own first gradient", "[session][gradients]") {
  // Where in the loop it joins, and whether the step of that window moves it.
  struct Place {
    const char* name;
    int64_t micro_steps;
    bool before_backward, moves;
  };
  for (const Place& place :
       {Place{"between windows", 1, true, true}, Place{"behind backward", 1, false, false},
        Place{"inside a window", 2, true, true}}) {
    CAPTURE(place.name);
    auto model = two_layers();
    const Tensor joins = model->parameters()[2], bias = model->parameters()[3];
    SGD optimizer(std::vector<Tensor>{model->parameters()[0], model->parameters()[1]}, SGDOptions(0.0));
    const CapturedStderr quiet;  // parameters that no optimizer has
    Loop<SGD> loop(optimizer, model);
    loop.session.use(GradientAccumulation(place.micro_steps));
    for (int64_t i = 0; i < 5 * place.micro_steps; ++i) loop.micro_step();
    REQUIRE(joins.grad().defined());
    for (int64_t i = 1; i < place.micro_steps; ++i) loop.micro_step();
    const Tensor before = joins.detach().clone();
    const auto join = [&] {
      optimizer.add_param_group(torch::optim::OptimizerParamGroup(
          {joins, bias}, std::make_unique<SGDOptions>(static_cast<double>(place.micro_steps))));
    };
    if (place.before_backward) join();
    const Tensor gradient =
        torch::autograd::grad({model->forward(loop.inputs).square().mean()}, {joins}).front();
    loop.session.backward(loop.forward());
    if (!place.before_backward) join();
    loop.session.step();
    CHECK(at::allclose(joins, place.moves ? before - gradient : before, 1e-5, 1e-6));
  }
}

TEST_CASE("a parameter that is frozen inside a window stays as it is", "[session][gradients]") {
  auto model = two_layers();
  SGD optimizer(model->parameters(), SGDOptions(0.1));
  Loop<SGD> loop(optimizer, model);
  loop.session.use(GradientAccumulation(2));
  const Tensor before = model->parameters()[0].detach().clone();
  loop.micro_step();
  model->parameters()[0].requires_grad_(false);
  loop.micro_step();
  CHECK(loop.session.progress().step == 1);
  CHECK(same_bits(model->parameters()[0], before));
}

}  // namespace pacer::testing::session_gradients
