// Parameters that are not trained, in a Session: as part of an optimizer, in checkpoints that hold them, and
// in checkpoints that leave them out and must still be enough to go on from.
#include <filesystem>
#include <limits>

#include <torch/nn/modules/linear.h>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/lora.h>
#include <pacer/modules/nf4.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/parallel/shards.h>
#include <pacer/session/session.h>

#include "support/catch.h"
#include "support/parallel/shard_runs.h"
#include "support/session/mistakes.h"
#include "support/temporary_folder.h"

namespace pacer::testing::session_frozen_weights {
namespace {

using Catch::Matchers::ContainsSubstring;
using torch::Tensor;

CheckpointsOptions without_frozen(const std::string& folder) {
  return CheckpointsOptions(folder).every(1).save_frozen(false);
}

// A model whose head may be trained for a while, a mask that is added to its logits, and its run.
// x [N, 4] -> [N, 3].
struct NetImpl : torch::nn::Module {
  NetImpl() {
    body = register_module("body", modules::Linear(4, 5));
    head = register_module("head", modules::Linear(5, 3));
    mask = register_parameter("mask", torch::zeros({3}), /*requires_grad=*/false);
  }
  Tensor forward(const Tensor& x) { return (head(body(x).tanh()) + mask).softmax(1); }
  modules::Linear body = nullptr, head = nullptr;
  Tensor mask;
};
TORCH_MODULE(Net);

struct Run {
  explicit Run(const CheckpointsOptions& options) {
    torch::manual_seed(1);
    model = Net();
    optimizer = std::make_unique<FusedAdamW>(model->parameters(), FusedAdamWOptions(0.05));
    session = std::make_unique<Session>(*model, *optimizer);
    session->use(Checkpoints(options));
  }
  void train(int64_t until) {
    while (session->progress().step < until) {
      torch::manual_seed(100 + session->progress().step);
      auto [x] = session->begin(torch::randn({6, 4}));
      session->backward(model->forward(x).square().mean());
      session->step();
    }
  }
  void head_trains(bool trains) {
    for (const Tensor& parameter : model->head->parameters()) parameter.requires_grad_(trains);
  }

  Net model = nullptr;
  std::unique_ptr<FusedAdamW> optimizer;
  std::unique_ptr<Session> session;
};

}  // namespace

TEST_CASE("an optimizer may have parameters that never needed a gradient", "[session]") {
  torch::manual_seed(1);
  struct QuantizedImpl : torch::nn::Module {
    QuantizedImpl() {
      body = register_module("body", modules::Linear(64, 64));
      head = register_module("head", modules::Linear(64, 2));
    }
    modules::Linear body = nullptr, head = nullptr;
  } model;
  modules::quantize(model, modules::Nf4Options().targets({"body"}));
  modules::dequantize(model);
  const Tensor before = model.body->weight.clone();
  FusedAdamW optimizer(model.parameters(), FusedAdamWOptions(0.1));
  Session session(model, optimizer);
  const auto step = [&] {
    auto [x] = session.begin(torch::ones({2, 64}));
    session.backward(model.head(model.body(x)).square().mean());
    session.step();
  };
  step();
  CHECK(model.body->weight.equal(before));
  // From where it does need one it is trained as any other.
  model.body->weight.requires_grad_(true);
  step();
  CHECK_FALSE(model.body->weight.equal(before));
}

TEST_CASE("weights that were trained and then frozen are not left out of checkpoints",
          "[checkpoint][resume]") {
  const TemporaryFolder folder;
  const auto is_refused = [](const std::string& heard) {
    CHECK(fault_of(heard, {"head.bias", "was trained and then frozen", "save_frozen(false)"}) == "");
  };

  SECTION("in the first steps") {
    Run run(without_frozen(folder.path()));
    run.train(3);
    run.head_trains(false);
    is_refused(heard_of([&] { run.train(4); }));
    // The run goes on where they are trained again.
    run.head_trains(true);
    run.train(5);
    run.session->finish();
    Run resumed(without_frozen(folder.path()));
    CHECK(resumed.session->resume() == 5);
  }
  SECTION("before a save, later") {
    Run run(without_frozen(folder.path()).every(100));
    run.train(12);
    run.head_trains(false);
    run.train(13);
    is_refused(heard_of([&] { run.session->finish(); }));
    for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
      CHECK_THAT(entry.path().filename().string(), !ContainsSubstring("step-"));
    }
  }
  SECTION("where they were frozen at first, too") {
    Run run(without_frozen(folder.path()));
    run.head_trains(false);
    run.train(2);
    run.head_trains(true);
    run.train(4);
    run.head_trains(false);
    is_refused(heard_of([&] { run.train(5); }));
  }
  SECTION("where the run was resumed in between") {
    Run first(without_frozen(folder.path()));
    first.train(2);
    first.session->finish();
    Run second(without_frozen(folder.path()));
    REQUIRE(second.session->resume() == 2);
    second.head_trains(false);
    is_refused(heard_of([&] { second.train(3); }));
  }
  SECTION("of an adapter that another one takes the place of") {
    Net model;
    torch::OrderedDict<std::string, Tensor> trained;
    for (const char* name : {"a", "b"}) {
      modules::add_lora(*model, modules::LoraOptions(2).targets({"body"}).name(name));
      for (const auto& item : modules::trainable(*model)) trained.insert(item.key(), item.value());
    }
    modules::set_adapter(*model, "a");
    FusedAdamW optimizer(trained, FusedAdamWOptions(0.05));
    Session session(*model, optimizer);
    session.use(Checkpoints(without_frozen(folder.path())));
    const auto step = [&] {
      auto [x] = session.begin(torch::ones({6, 4}));
      session.backward(model->forward(x).square().mean());
      session.step();
    };
    step();
    modules::set_adapter(*model, "b");
    CHECK(fault_of(heard_of(step), {"lora_", "was trained and then frozen"}) == "");
  }
}

TEST_CASE("weights that are frozen or unfrozen before they were trained may be left out from then on",
          "[checkpoint][resume]") {
  const TemporaryFolder folder;
  SECTION("unfrozen between resume and the first step") {
    {
      Run first(without_frozen(folder.path()));
      first.head_trains(false);
      first.train(2);
      first.session->finish();
    }
    {
      Run second(without_frozen(folder.path()));
      second.head_trains(false);
      REQUIRE(second.session->resume() == 2);
      second.head_trains(true);
      second.train(4);
      second.session->finish();
    }
    Run third(without_frozen(folder.path()));
    CHECK(third.session->resume() == 4);
  }
  SECTION("frozen before the first step") {
    {
      Run first(without_frozen(folder.path()));
      CHECK(first.session->resume() == std::nullopt);
      first.head_trains(false);
      first.train(2);
      first.session->finish();
    }
    Run second(without_frozen(folder.path()));
    second.head_trains(false);
    CHECK(second.session->resume() == 2);
  }
}

TEST_CASE("Shards of parameters refuse checkpoints without frozen weights before training starts",
          "[checkpoint][shards][ranks]") {
  const TemporaryFolder folder;
  const auto refusals = [&](int world_size, Sharded what) {
    auto runs = shards::runs_of(all_optimizers().front(), {}, world_size, [&](SmallRun& run) {
      shards::sharded(what)(run);
      run.model->head->bias.requires_grad_(false);
      run.session->use(Checkpoints(
          without_frozen(folder.path(std::string(shards::name_of(what)) + std::to_string(world_size)))));
    });
    return shards::step_all(runs);
  };
  CHECK(fault_of(refusals(2, Sharded::parameters),
                 {"cannot leave frozen weights out while ranks keep parts of the parameters",
                  "leave save_frozen(false) out"}) == "");
  CHECK(refusals(2, Sharded::gradients) == "");
}

TEST_CASE("a frozen parameter that is not finite is not what a checkpoint is warned of", "[checkpoint]") {
  const TemporaryFolder folder;
  Run run(CheckpointsOptions(folder.path()).every(1).synchronous(true));
  {
    const torch::NoGradGuard no_grad;
    run.model->mask[2] = -std::numeric_limits<float>::infinity();
  }
  CHECK(heard_of([&] { run.train(2); }) == "");
  CHECK_THAT(content_of(folder.path("step-0000000002/manifest.json")), !ContainsSubstring("finite"));
  // One that is trained is.
  {
    const torch::NoGradGuard no_grad;
    run.model->head->bias[1] = std::numeric_limits<float>::infinity();
  }
  CHECK(fault_of(heard_of([&] { run.train(3); }), {"are not finite"}) == "");
}

}  // namespace pacer::testing::session_frozen_weights
