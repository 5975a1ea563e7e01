// Checkpoints of adapters without the frozen weights: a run goes on from them to the bit, and only over the
// same weights.
#include "support/catch.h"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/core/error.h>
#include <pacer/hooks/gradient_clipping.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/lora.h>
#include <pacer/modules/nf4.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/session/session.h>

#include "support/temporary_folder.h"

namespace pacer::testing::adapter_checkpoints {
namespace {

using Catch::Matchers::ContainsSubstring;
using torch::Tensor;

struct Trainer {
  torch::nn::Sequential model{modules::Linear(16, 32), modules::Linear(32, 8), torch::nn::Linear(8, 2)};
  std::unique_ptr<FusedAdamW> optimizer;

  explicit Trainer(uint64_t seed = 1) {
    torch::manual_seed(seed);
    for (const auto& parameter : model->parameters()) {
      const torch::NoGradGuard no_grad;
      parameter.normal_(0, 0.3);
    }
    modules::quantize(*model, modules::Nf4Options().targets({"0"}));
    modules::add_lora(*model, modules::LoraOptions(4).targets({"0", "1"}));
    optimizer = std::make_unique<FusedAdamW>(modules::trainable(*model), FusedAdamWOptions(1e-2));
  }

  void train(Session& session, int64_t until) {
    while (session.progress().step < until) {
      torch::manual_seed(100 + session.progress().step);
      auto [x] = session.begin(torch::randn({8, 16}));
      session.backward(model->forward(x).square().sum());
      session.step();
    }
  }
};

}  // namespace

TEST_CASE("a checkpoint of adapters leaves frozen weights out and goes on over the same ones", "[lora]") {
  const TemporaryFolder folder;
  const auto checkpoints = [&] {
    return Checkpoints(CheckpointsOptions(folder.path()).every(5).save_frozen(false));
  };
  Trainer unbroken;
  {
    Session session(*unbroken.model, *unbroken.optimizer);
    session.use(GradientClipping(1.0));
    unbroken.train(session, 12);
  }
  {
    Trainer first;
    Session session(*first.model, *first.optimizer);
    session.use(GradientClipping(1.0)).use(checkpoints());
    first.train(session, 5);
    session.finish();
  }
  Trainer resumed;
  Session session(*resumed.model, *resumed.optimizer);
  session.use(GradientClipping(1.0)).use(checkpoints());
  REQUIRE(session.resume() == 5);
  resumed.train(session, 12);
  session.finish();
  for (const auto& item : modules::trainable(*unbroken.model)) {
    CHECK(item.value().equal(modules::trainable(*resumed.model)[item.key()]));
  }
  const auto size = [&](const std::string& file) {
    return content_of(folder.path("step-0000000012/" + file)).size();
  };
  CHECK(size("model.safetensors") < 4 * 4 * (16 + 32 + 32 + 8) + 1000);

  SECTION("other frozen weights are refused") {
    Trainer other(2);
    Session wrong(*other.model, *other.optimizer);
    wrong.use(GradientClipping(1.0)).use(checkpoints());
    const Tensor before = modules::trainable(*other.model).front().value().clone();
    CHECK_THROWS_WITH(wrong.resume(), ContainsSubstring("the frozen weights of this model are not those"));
    CHECK(before.equal(modules::trainable(*other.model).front().value()));
  }
  SECTION("so are those of another shape, though their bytes are the same") {
    Trainer other;
    const Tensor bias = other.model->named_parameters()["2.bias"];
    REQUIRE_FALSE(bias.requires_grad());
    bias.set_data(bias.detach().view({1, 2}));
    Session wrong(*other.model, *other.optimizer);
    wrong.use(GradientClipping(1.0)).use(checkpoints());
    CHECK_THROWS_WITH(wrong.resume(), ContainsSubstring("the frozen weights of this model are not those"));
  }
  SECTION("without the option such a checkpoint does not fit") {
    Trainer other;
    Session wrong(*other.model, *other.optimizer);
    wrong.use(GradientClipping(1.0)).use(Checkpoints(CheckpointsOptions(folder.path())));
    CHECK_THROWS_AS(wrong.resume(), InvalidArgument);
  }
}

}  // namespace pacer::testing::adapter_checkpoints
