// GradientRelease: weights and state are those of the plain step to the bit, with every hook that it goes with, over
// parameters that come and go; and gradients do not exist together.
#include <algorithm>
#include <memory>

#include <torch/nn/modules/linear.h>

#include <pacer/collectives/detail/gradient_hook.h>
#include <pacer/hooks/gradient_release.h>

#include "support/catch.h"
#include "support/message_of.h"
#include "support/samples.h"
#include "support/session/releasing.h"
#include "support/session/small_run.h"

namespace pacer::testing {
namespace {

RegisteredHook release_hook() {
  return {"gradient release", "release", false,
          [](Session& s, SmallModel&, EpochSampler&) { s.use(GradientRelease()); }};
}

std::vector<RegisteredHook> with_release(std::vector<RegisteredHook> hooks) {
  hooks.push_back(release_hook());
  return hooks;
}

// Both train, and after each step everything that a checkpoint holds is the same.
void require_same_steps(SmallRun& plain, SmallRun& released, int steps) {
  for (int step = 0; step < steps; ++step) {
    plain.step();
    released.step();
    CAPTURE(step);
    REQUIRE(plain.loss == released.loss);
    REQUIRE(first_difference(plain.state(), released.state()) == "");
  }
}

// Layers of [8, 8], of which a step may take some only.
struct Branches {
  explicit Branches(bool releases) {
    torch::manual_seed(3);
    for (int i = 0; i < 4; ++i) {
      layers.push_back(model->register_module(std::to_string(i), torch::nn::Linear(8, 8)));
    }
    optimizer = std::make_unique<FusedAdamW>(model->named_parameters(), FusedAdamWOptions(0.01));
    session = std::make_unique<Session>(*model, *optimizer);
    if (releases) session->use(GradientRelease());
  }
  void step(const std::vector<int>& taken) {
    auto [x] = session->begin(torch::linspace(-1, 1, 16).view({2, 8}));
    Tensor y = x;
    for (const int i : taken) y = torch::tanh(layers[static_cast<size_t>(i)](y));
    session->backward(y.square().mean());
    session->step();
  }
  NamedTensors state() const {
    NamedTensors all = optimizer->export_state();
    for (const auto& item : model->named_parameters()) all["model/" + item.key()] = item.value().detach();
    return all;
  }

  std::shared_ptr<torch::nn::Module> model = std::make_shared<torch::nn::Module>("branches");
  std::vector<torch::nn::Linear> layers;
  std::unique_ptr<FusedAdamW> optimizer;
  std::unique_ptr<Session> session;
};

}  // namespace

TEST_CASE("with released gradients every optimizer takes the plain step to the bit", "[release][session]") {
  for (const RegisteredOptimizer& optimizer : releasing_optimizers()) {
    INFO(optimizer.name);
    SmallRun plain(optimizer, {}), released(optimizer, {release_hook()});
    require_same_steps(plain, released, 5);
    for (const Tensor& parameter : released.model->parameters()) REQUIRE_FALSE(parameter.grad().defined());
  }
}

TEST_CASE("released gradients go with each hook that neither adds gradients up nor looks at them",
          "[release][session]") {
  const RegisteredOptimizer optimizer = releasing_optimizers().front();
  const auto hooks = all_hooks();
  Turns turns(wants_long_tests() ? 1 : 4, 0);
  for (size_t a = 0; a < hooks.size(); ++a) {
    if (!goes_with_release(hooks[a])) continue;
    for (size_t b = a; b < hooks.size(); ++b) {
      const bool is_pair = hooks[b].kind != hooks[a].kind;
      if (!goes_with_release(hooks[b]) || (b != a && (!is_pair || !turns.is_next()))) continue;
      std::vector<RegisteredHook> chosen{hooks[a]};
      if (b != a) chosen.push_back(hooks[b]);
      INFO(hooks[a].name << " with " << hooks[b].name);
      SmallRun plain(optimizer, chosen), released(optimizer, with_release(chosen));
      require_same_steps(plain, released, 4);
    }
  }
}

TEST_CASE("released gradients go with what joins ranks, where there is one rank", "[release][session]") {
  for (const bool shards : {false, true}) {
    CAPTURE(shards);
    const RegisteredHook joining{
        "joining", "reduce", false, [shards](Session& s, SmallModel&, EpochSampler&) {
          shards ? s.use(Shards(ShardsOptions().what(Sharded::gradients))) : s.use(DataParallel());
        }};
    SmallRun plain(releasing_optimizers().front(), {joining}),
        released(releasing_optimizers().front(), with_release({joining}));
    require_same_steps(plain, released, 3);
  }
}

TEST_CASE("released gradients are refused beside each hook that adds gradients up or looks at them",
          "[release][session]") {
  for (const RegisteredHook& hook : all_hooks()) {
    if (goes_with_release(hook)) continue;
    INFO(hook.name);
    SmallRun run(releasing_optimizers().front(), with_release({hook}));
    const Tensor before = run.model->head->weight.detach().clone();
    const std::string message = message_of<InvalidArgument>([&] { run.step(); });
    REQUIRE(contains(message, hook.kind == "accumulation" ? "leave out GradientAccumulation, or"
                                                          : "look at all of them first"));
    REQUIRE(run.model->head->weight.equal(before));
  }
}

TEST_CASE("a run with released gradients goes on from a checkpoint to the bit, with and without them",
          "[release][session]") {
  for (const RegisteredOptimizer& optimizer : releasing_optimizers()) {
    INFO(optimizer.name);
    const auto rate = [](Session& s, SmallModel&, EpochSampler&) {
      s.use(LearningRate(warmup_cosine({3, 20})));
    };
    const RegisteredHook schedule{"learning rate", "learning rate", false, rate};
    SmallRun run(optimizer, with_release({schedule})), resumed(optimizer, with_release({schedule})),
        plain(optimizer, {schedule});
    for (int step = 0; step < 3; ++step) run.step();
    resumed.step();
    resumed.load(run.state());
    plain.load(run.state());
    require_same_steps(run, resumed, 3);
    for (int step = 0; step < 3; ++step) plain.step();
    REQUIRE(first_difference(run.state(), plain.state()) == "");
  }
}

TEST_CASE("with released gradients a parameter that is not reached sits the step out", "[release][session]") {
  Branches plain(false), released(true);
  const std::vector<std::vector<int>> steps = {{0, 1}, {0}, {1, 3}, {2}, {0, 1, 2, 3}, {0, 1, 2, 3}, {3}};
  for (const auto& taken : steps) {
    plain.step(taken);
    released.step(taken);
    REQUIRE(first_difference(plain.state(), released.state()) == "");
  }
  CHECK(released.state().count("0.weight/exp_avg") == 1);
  const auto count = [&](const char* name) { return released.state().at(name).item<int64_t>(); };
  CHECK(count("0.weight/step") == 4);
  CHECK(count("2.bias/step") == 3);
}

TEST_CASE("with released gradients parameters are frozen, unfrozen, moved and added between steps",
          "[release][session]") {
  Branches plain(false), released(true);
  const auto both = [&](const auto& change) {
    for (Branches* run : {&plain, &released}) change(*run);
    for (int step = 0; step < 2; ++step) {
      plain.step({0, 1, 2});
      released.step({0, 1, 2});
      REQUIRE(first_difference(plain.state(), released.state()) == "");
    }
  };
  both([](Branches&) {});
  both([](Branches& run) { run.layers[1]->weight.requires_grad_(false); });
  both([](Branches& run) { run.layers[1]->weight.requires_grad_(true); });
  // A weight with gaps between its rows, whose gradient has none.
  both([](Branches& run) {
    const torch::NoGradGuard no_grad;
    Tensor& weight = run.layers[2]->weight;
    weight.set_data(torch::zeros({8, 12}).narrow(1, 2, 8).copy_(weight));
  });
  // One in columns, whose gradient may be in rows.
  both([](Branches& run) {
    const torch::NoGradGuard no_grad;
    Tensor& weight = run.layers[0]->weight;
    weight.set_data(weight.t().contiguous().t());
  });
  both([](Branches& run) { run.optimizer->param_groups()[0].options().set_lr(0.003); });
}

TEST_CASE("with released gradients a weight that is used twice is updated once, with both gradients",
          "[release][session]") {
  struct Tied : torch::nn::Module {
    Tied() : weight(register_parameter("weight", torch::randn({8, 8}) / 3)) {}
    Tensor weight;
  };
  const auto trained = [](bool releases) {
    torch::manual_seed(2);
    Tied model;
    FusedAdam optimizer(model.named_parameters(), FusedAdamOptions(0.01));
    Session session(model, optimizer);
    if (releases) session.use(GradientRelease());
    for (int step = 0; step < 4; ++step) {
      auto [x] = session.begin(torch::linspace(-1, 1, 16).view({2, 8}));
      session.backward(torch::tanh(x.mm(model.weight)).mm(model.weight.t()).square().mean());
      session.step();
    }
    return model.weight.detach().clone();
  };
  REQUIRE(trained(true).equal(trained(false)));
}

TEST_CASE("with released gradients a small parameter whose first gradient comes last has the plain state",
          "[release][session]") {
  struct Scaled : torch::nn::Module {
    Scaled()
        : scale(register_parameter("scale", torch::linspace(0.5, 1.5, 32).to(at::kBFloat16))),
          wide(register_module("wide", torch::nn::Linear(32, 64))) {
      wide->to(at::kBFloat16);
    }
    Tensor scale;
    torch::nn::Linear wide;
  };
  const auto trained = [](bool releases) {
    torch::manual_seed(2);
    Scaled model;
    const auto options = FusedAdamWOptions(0.01).master_weights(MasterWeights::fp32);
    FusedAdamW optimizer(model.named_parameters(), options);
    Session session(model, optimizer);
    if (releases) session.use(GradientRelease());
    for (int step = 0; step < 3; ++step) {
      auto [x] = session.begin(torch::linspace(-1, 1, 64).view({2, 32}).to(at::kBFloat16));
      session.backward(model.wide(x * model.scale).square().mean());
      session.step();
    }
    NamedTensors state = optimizer.export_state();
    for (const auto& item : state) REQUIRE_FALSE(item.second.requires_grad());
    state["model/scale"] = model.scale.detach().clone();
    return state;
  };
  REQUIRE(first_difference(trained(true), trained(false)) == "");
}

TEST_CASE("released gradients do not exist together", "[release][session]") {
  torch::manual_seed(1);
  torch::nn::Sequential model;
  constexpr int64_t kLayers = 40;
  for (int64_t i = 0; i < kLayers; ++i) {
    model->push_back(torch::nn::Linear(32, 32));
    model->push_back(torch::nn::Tanh());
  }
  const std::vector<Tensor> parameters = model->parameters();
  size_t most = 0, arrivals = 0;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
  for (const Tensor& parameter : parameters) {  // they come before the hook's
    detail::add_gradient_hook(parameter, model.ptr(), [&](const Tensor& reached) {
      ++arrivals;
      storages.push_back(reached.grad().storage().getWeakStorageImpl());
      most = std::max(most, static_cast<size_t>(std::count_if(storages.begin(), storages.end(),
                                                              [](const auto& s) { return !s.expired(); })));
    });
  }
  FusedAdamW optimizer(parameters, FusedAdamWOptions(0.001));
  Session session(*model, optimizer);
  session.use(GradientRelease());
  const auto step = [&] {
    most = arrivals = 0;
    auto [x] = session.begin(torch::ones({2, 32}));
    session.backward(model->forward(x).square().mean());
    REQUIRE(arrivals == parameters.size());
    for (const Tensor& parameter : parameters) REQUIRE_FALSE(parameter.grad().defined());
    session.step();
  };
  step();  // a sixteenth of all may wait for states
  CHECK(most <= 2 * static_cast<size_t>(kLayers) / 16 + 2);
  step();
  CHECK(most == 1);
}

}  // namespace pacer::testing
