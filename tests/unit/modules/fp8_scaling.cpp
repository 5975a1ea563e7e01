// Fp8Scaling: what its scales and the codes of weights do between steps, its state, and what it refuses.
#include "support/catch.h"

#include <limits>

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <pacer/modules/fp8_scaling.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/recompute.h>

#include "support/kernels/fp8_reference.h"

namespace pacer::testing::fp8_scaling {
namespace {

using kernels::Fp8Format;

Fp8Options current() { return Fp8Options().recipe(Fp8Recipe::current); }

}  // namespace

TEST_CASE("scales stand still between updates and then follow the largest magnitudes", "[fp8][modules]") {
  torch::manual_seed(7);
  torch::nn::Sequential model(modules::Linear(16, 32), modules::Linear(32, 16));
  const auto scaling = std::make_shared<Fp8Scaling>(*model, Fp8Options().amax_history(2));
  const auto pass = [&](const Tensor& x) {
    const Fp8Scope scope(scaling);
    return model->forward(x);
  };
  const auto scale = [&](const std::string& name) {
    return scaling->state().at(name + ".scale").item<float>();
  };
  const auto history = [&](const std::string& name) { return scaling->state().at(name + ".history"); };
  const auto fitting = [](float amax) {
    return kernels::fp8_scale(kernels::bits_of(amax), Fp8Format::e4m3, {});
  };
  REQUIRE(scaling->layers() == 2);
  REQUIRE(scaling->state().size() == 8);

  const Tensor x = torch::randn({16, 16}).clamp(-2, 2);
  x[3][4] = 3;
  // Without a history it is measured: as current scaling.
  const auto own = std::make_shared<Fp8Scaling>(*model, current());
  Tensor by_own;
  {
    const Fp8Scope scope(own);
    by_own = model->forward(x);
  }
  CHECK(pass(x).equal(by_own));
  CHECK(pass(x * 5).isfinite().all().item<bool>());  // measured, too
  CHECK(scale("0.input") == 1);
  scaling->update();
  CHECK(scale("0.input") == fitting(15));
  CHECK(history("0.input").equal(torch::tensor({15.f, 0.f})));
  CHECK(scale("1.gradient") == 1);  // there was no backward pass
  CHECK(history("1.gradient").equal(torch::zeros({2})));

  pass(x).sum().backward();
  CHECK(scale("0.input") == fitting(15));
  scaling->update();
  CHECK(scale("0.input") == fitting(15));
  CHECK(history("0.input").equal(torch::tensor({15.f, 3.f})));
  CHECK(history("1.gradient").equal(torch::tensor({1.f, 0.f})));
  pass(x);
  scaling->update();
  CHECK(scale("0.input") == fitting(3));

  const auto before = scaling->state();
  model->eval();
  pass(x * 100);
  scaling->update();
  model->train();
  pass(x * 100);
  scaling->forget();
  scaling->update();
  kernels::GradientCheck skipped;
  skipped.non_finite = 1;
  pass(x * 100);
  scaling->update(&skipped);
  pass(x * std::numeric_limits<float>::infinity());
  scaling->update();
  for (const auto& [name, tensor] : before) CHECK(scaling->state().at(name).equal(tensor));
}

TEST_CASE("a weight that was written to is cast anew", "[fp8][modules]") {
  modules::Linear layer(torch::nn::LinearOptions(16, 16).bias(false));
  const auto scaling = std::make_shared<Fp8Scaling>(*layer);
  const Fp8Scope scope(scaling);
  const Tensor x = torch::eye(16);
  const auto doubled_follows = [&](const std::function<void()>& write) {
    const Tensor before = layer(x);
    write();
    CHECK(layer(x).equal(before * 2));
  };
  const at::NoGradGuard no_grad;
  doubled_follows([&] { layer->weight.mul_(2); });
  doubled_follows([&] { layer->weight.set_data(layer->weight.detach() * 2); });
  doubled_follows([&] {
    layer->weight.data().mul_(2);  // counts no version: seen from the next step on
    scaling->update();
  });
  scaling->keep_weights(false);
  doubled_follows([&] { layer->weight.data().mul_(2); });
}

TEST_CASE("a recomputed layer sees the scales and the scope of its forward pass", "[fp8][modules]") {
  for (const Fp8Options& options : {Fp8Options(), current()}) {
    torch::manual_seed(9);
    torch::nn::Sequential model(modules::Linear(16, 32), modules::Linear(32, 16));
    const Tensor x = torch::randn({16, 16}).requires_grad_();
    std::vector<std::map<std::string, Tensor>> states;
    std::vector<Tensor> gradients;
    for (const bool recomputes : {false, true}) {
      const auto scaling = std::make_shared<Fp8Scaling>(*model, options);
      model->zero_grad();
      x.mutable_grad() = Tensor();
      for (int step = 0; step < 3; ++step) {
        Tensor y;
        {
          const Fp8Scope scope(scaling);
          const auto f = [&](const Tensor& h) { return model->forward(h); };
          y = recomputes ? recompute(*model, f, x) : f(x);
        }
        y.to(at::kFloat).square().sum().backward();
        scaling->update();
      }
      CHECK(Fp8Scope::current() == nullptr);
      states.push_back(scaling->state());
      gradients.push_back(at::cat({x.grad().flatten(), model->parameters()[0].grad().flatten()}));
    }
    CHECK(gradients[0].equal(gradients[1]));
    for (const auto& [name, tensor] : states[0]) CHECK(states[1].at(name).equal(tensor));
  }
}

TEST_CASE("a state continues where it was saved, also with another length of history", "[fp8][modules]") {
  torch::manual_seed(10);
  modules::Linear layer(16, 16);
  const auto run = [&](const std::shared_ptr<Fp8Scaling>& scaling, int from, int to) {
    for (int step = from; step < to; ++step) {
      const Fp8Scope scope(scaling);
      layer(torch::full({16, 16}, step % 5 + 1.0)).sum().backward();
      scaling->update();
    }
  };
  const auto unbroken = std::make_shared<Fp8Scaling>(*layer, Fp8Options().amax_history(4));
  run(unbroken, 0, 6);
  const auto saved = unbroken->state();
  CHECK(saved.at("input.history").equal(torch::tensor({3.f, 4.f, 5.f, 1.f})));
  run(unbroken, 6, 9);
  const auto resumed = std::make_shared<Fp8Scaling>(*layer, Fp8Options().amax_history(4));
  resumed->set_state(saved);
  run(resumed, 6, 9);
  for (const auto& [name, tensor] : unbroken->state()) CHECK(resumed->state().at(name).equal(tensor));
  const auto shorter = std::make_shared<Fp8Scaling>(*layer, Fp8Options().amax_history(2));
  shorter->set_state(saved);
  CHECK(shorter->state().at("input.history").equal(torch::tensor({5.f, 1.f})));
  const auto longer = std::make_shared<Fp8Scaling>(*layer, Fp8Options().amax_history(5));
  longer->set_state(saved);
  CHECK(longer->state().at("input.history").equal(torch::tensor({3.f, 4.f, 5.f, 1.f, 0.f})));

  const auto refused = [&](const std::string& key, const Tensor& value, const std::string& message) {
    auto wrong = saved;
    if (value.defined()) {
      wrong[key] = value;
    } else {
      wrong.erase(key);
    }
    const auto before = resumed->state();
    CHECK_THROWS_WITH(resumed->set_state(wrong), Catch::Matchers::ContainsSubstring(message));
    for (const auto& [name, tensor] : before) CHECK(resumed->state().at(name).equal(tensor));
  };
  refused("gradient.scale", Tensor(), "has no \"gradient.scale\"");
  refused("gradient.scale", torch::tensor(-1.f), "no scale can be");
  refused("input.history", torch::tensor({-1.f}), "no magnitude can be");
  refused("input.history", torch::tensor({1, 2}), "another form");
}

TEST_CASE("what cannot work in 8 bits is refused with a sentence", "[fp8][modules]") {
  using Catch::Matchers::ContainsSubstring;
  torch::nn::Sequential model(modules::Linear(16, 16), modules::Linear(16, 16), modules::Linear(16, 16));
  const auto refused = [&](const Fp8Options& options, const std::string& message) {
    CHECK_THROWS_WITH(Fp8Scaling(*model, options), ContainsSubstring(message));
  };
  refused(Fp8Options().amax_history(0), "amax_history must be from 1 to 1024, not 0");
  refused(Fp8Options().margin(-1), "margin must be from 0 to 16, not -1");
  refused(Fp8Options().keep_first(-1), "keep_first");
  refused(Fp8Options().keep_first(2).keep_last(1), "leave none of the 3");
  refused(Fp8Options().gradients(at::kHalf), "must be Float8_e5m2 or Float8_e4m3fn, not Half");
  CHECK(Fp8Scaling(*model, Fp8Options().keep_first(1).keep_last(1)).layers() == 1);
  torch::nn::Linear plain(16, 16);
  CHECK_THROWS_WITH(Fp8Scaling(*plain), ContainsSubstring("no pacer::modules::Linear"));
  CHECK_THROWS_WITH(modules::Linear(-1, 4), ContainsSubstring("not negative"));

  const auto scaling = std::make_shared<Fp8Scaling>(*model);
  const Fp8Scope scope(scaling);
  const Tensor x = torch::randn({16, 16}).requires_grad_();
  const Tensor y = model->forward(x).sum();
  CHECK_THROWS_WITH(torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true),
                    ContainsSubstring("no second derivative"));
}

}  // namespace pacer::testing::fp8_scaling
