// Checkpoints of models with several active adapters: a run goes on with the same ones, or says which they are.
#include <memory>

#include <torch/nn/modules/container/modulelist.h>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/checkpoints/detail/merged_weights.h>
#include <pacer/core/error.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/session/session.h>

#include "support/catch.h"
#include "support/checkpoints/adapter_samples.h"
#include "support/message_of.h"

namespace pacer::testing::active_adapters {
namespace {

using Catch::Matchers::ContainsSubstring;

struct Run {
  FileNet model;
  std::unique_ptr<FusedAdamW> optimizer;
  std::unique_ptr<Session> session;

  explicit Run(const std::string& folder, const Names& active = {"a", "b"}) {
    torch::manual_seed(1);
    model = FileNet();
    for (const char* name : {"a", "b", "c"}) {
      modules::add_lora(*model, modules::LoraOptions(2).targets({"block.up", "block.down"}).name(name));
    }
    modules::set_adapters(*model, {"a", "b", "c"});
    optimizer = std::make_unique<FusedAdamW>(modules::trainable(*model), FusedAdamWOptions(0.05));
    modules::set_adapters(*model, active);
    session = std::make_unique<Session>(*model, *optimizer);
    session->use(Checkpoints(CheckpointsOptions(folder).every(100)));
  }
  void train(int64_t until) {
    while (session->progress().step < until) {
      torch::manual_seed(100 + session->progress().step);
      auto [x] = session->begin(torch::randn({16, 64}));
      session->backward(model->forward(x).square().mean());
      session->step();
    }
  }
};

}  // namespace

TEST_CASE("a run with several active adapters is resumed with the same ones", "[lora][session]") {
  const TemporaryFolder folder;
  Run first(folder.path("run")), unbroken(folder.path("unbroken"));
  const ModelState before = state_of_model(*first.model);
  first.train(4);
  for (const auto& [name, tensor] : detail::model_tensors(*first.model)) {
    CAPTURE(name);
    const bool is_trained =
        name.find("lora_a") != std::string::npos || name.find("lora_b") != std::string::npos;
    CHECK(same_bits(tensor, before.values.at(name)) == !is_trained);
  }
  modules::merge(*first.model);
  first.session->finish();
  modules::unmerge(*first.model);
  unbroken.train(6);

  for (const Names& other : {Names{"a"}, Names{"a", "c"}, Names{"a", "b", "c"}, Names{}}) {
    Run wrong(folder.path("run"), other);
    const ModelState was = state_of_model(*wrong.model);
    CHECK_THAT(message_of<Error>([&] { wrong.session->resume(); }),
               ContainsSubstring("was {\"a\", \"b\"}") &&
                   ContainsSubstring("call set_adapters(model, {\"a\", \"b\"}) and resume then"));
    CHECK(changed_since(*wrong.model, was) == "");
  }
  Run second(folder.path("run"), {"b", "a"});
  REQUIRE(second.session->resume() == 4);
  second.train(6);
  const Tensor x = torch::ones({2, 64});
  CHECK(same_bits(second.model->forward(x), unbroken.model->forward(x)));
}

TEST_CASE("the record of active adapters has a line for each layer, as before where one is active",
          "[lora]") {
  FileNet model;
  CHECK(detail::active_adapters(*model) == "");
  modules::add_lora_to(*model, modules::LoraOptions(1).name("b"), {"block.up", "down"});
  CHECK(detail::active_adapters(*model) == "block.up\tb\ndown\tb\n");
  modules::add_lora(*model, modules::LoraOptions(1).targets({"block.up"}).name("a"));
  CHECK(detail::active_adapters(*model) == "block.up\ta\ndown\t\n");
  modules::set_adapters(*model, {"a", "b"});
  CHECK(detail::active_adapters(*model) == "block.up\tb\ta\ndown\tb\n");
}

}  // namespace pacer::testing::active_adapters
