// State of adapters that is in no matrix of theirs: merged weights, which adapter is active, and what else of
// the model was trained with them.
#include <filesystem>
#include <memory>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <nlohmann/json.hpp>

#include <pacer/checkpoints/adapter_files.h>
#include <pacer/checkpoints/checkpoints.h>
#include <pacer/checkpoints/load_weights.h>
#include <pacer/checkpoints/save_weights.h>
#include <pacer/core/error.h>
#include <pacer/files/checkpoint_folder.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/session/save_best.h>
#include <pacer/session/session.h>
#include <pacer/session/validation.h>

#include "support/catch.h"
#include "support/checkpoints/adapter_samples.h"
#include "support/message_of.h"

namespace pacer::testing::adapter_state {
namespace {

using Catch::Matchers::ContainsSubstring;
using nlohmann::json;

// x [N, 8] -> [N, 3].
struct NormNetImpl : torch::nn::Module {
  NormNetImpl() {
    up = register_module("up", modules::Linear(8, 12));
    norm = register_module("norm", torch::nn::BatchNorm1d(12));
    down = register_module("down", modules::Linear(12, 6));
    head = register_module("head", torch::nn::Linear(6, 3));
  }
  Tensor forward(const Tensor& x) { return head(down(norm(up(x)).tanh())); }
  modules::Linear up = nullptr, down = nullptr;
  torch::nn::BatchNorm1d norm = nullptr;
  torch::nn::Linear head = nullptr;
};
TORCH_MODULE(NormNet);

NormNet base_model(uint64_t seed = 1) {
  torch::manual_seed(seed);
  return NormNet();
}

Tensor batch(int64_t step) {
  torch::manual_seed(100 + step);
  return torch::randn({16, 8}) * 2 + 1;
}

// The model with adapters, and the run that trains it.
struct Run {
  NormNet model = base_model();
  std::unique_ptr<FusedAdamW> optimizer;
  std::unique_ptr<Session> session;

  Run(const std::string& folder, bool save_frozen) {
    modules::add_lora(*model, modules::LoraOptions(2).alpha(4).targets({"up", "down"}));
    model->norm->eval();  // else its statistics would hide what is compared
    optimizer = std::make_unique<FusedAdamW>(modules::trainable(*model), FusedAdamWOptions(0.05));
    session = std::make_unique<Session>(*model, *optimizer);
    session->use(Checkpoints(CheckpointsOptions(folder).every(100).save_frozen(save_frozen)));
  }
  void train(int64_t until) {
    while (session->progress().step < until) {
      auto [x] = session->begin(batch(session->progress().step));
      session->backward(model->forward(x).square().mean());
      session->step();
    }
  }
};

}  // namespace

TEST_CASE("a checkpoint that is saved while an adapter is merged holds what unmerge restores",
          "[lora][session]") {
  for (const bool save_frozen : {true, false}) {
    CAPTURE(save_frozen);
    const TemporaryFolder folder;
    Run first(folder.path("run"), save_frozen);
    first.train(4);
    modules::merge(*first.model);
    const Tensor wanted = first.model->forward(batch(50)).detach();
    first.session->finish();
    modules::unmerge(*first.model);

    Run second(folder.path("run"), save_frozen);
    REQUIRE(second.session->resume() == 4);
    CHECK(distance(second.model->forward(batch(50)), wanted) < 1e-5);
    for (const auto& [name, tensor] : detail::model_tensors(*first.model)) {
      CAPTURE(name);
      CHECK(same_bits(detail::model_tensors(*second.model).at(name), tensor));
    }
    Run unbroken(folder.path("unbroken"), save_frozen);
    unbroken.train(6);
    second.train(6);
    CHECK(same_bits(unbroken.model->forward(batch(50)), second.model->forward(batch(50))));
  }
}

TEST_CASE("a merged model takes no checkpoint and no weights, which would count the adapter twice",
          "[lora][session]") {
  const TemporaryFolder folder;
  {
    Run first(folder.path("run"), true);
    first.train(2);
    first.session->finish();
    save_weights(*first.model, folder.path("weights.safetensors"));
  }
  Run second(folder.path("run"), true);
  modules::merge(*second.model);
  const ModelState before = state_of_model(*second.model);
  CHECK_THAT(message_of<Error>([&] { second.session->resume(); }), ContainsSubstring("\"down\" is merged"));
  CHECK_THAT(message_of<Error>([&] {
               load_weights(*second.model, folder.path("weights.safetensors"),
                            LoadWeightsOptions().allow_missing(true));
             }),
             ContainsSubstring("\"down\" is merged"));
  CHECK(changed_since(*second.model, before) == "");
  modules::unmerge(*second.model);
  CHECK(second.session->resume() == 2);
}

TEST_CASE("merged weights that were written to since cannot be saved as what they were", "[lora][session]") {
  const TemporaryFolder folder;
  Run run(folder.path(), true);
  run.train(2);
  modules::merge(*run.model);
  {
    const torch::NoGradGuard no_grad;
    run.model->down->weight.add_(1);
  }
  CHECK_THAT(message_of<Error>([&] { run.session->finish(); }),
             ContainsSubstring("\"down\" was written to since its adapter was merged"));
  CHECK(list_checkpoints(folder.path()).empty());
}

TEST_CASE("the best model that is saved while an adapter is merged is the model with its adapter",
          "[lora][session]") {
  const TemporaryFolder folder;
  Run run(folder.path("run"), true);
  Tensor wanted;
  run.session
      ->use(Validation(2,
                       [&] {
                         modules::merge(*run.model);  // so that measuring costs less
                         wanted = run.model->forward(batch(50)).detach();
                         return 1.0;
                       }))
      .use(SaveBest(folder.path("best")));
  run.train(2);
  modules::unmerge(*run.model);
  NormNet other = base_model(7);
  modules::add_lora(*other, modules::LoraOptions(2).alpha(4).targets({"up", "down"}));
  other->norm->eval();
  load_weights(*other, folder.path("best/model.safetensors"));
  CHECK(distance(other->forward(batch(50)), wanted) < 1e-5);
}

TEST_CASE("a run goes on with the adapter that was active, or says which one that is", "[lora][session]") {
  const TemporaryFolder folder;
  struct Two {
    NormNet model = base_model();
    std::unique_ptr<FusedAdamW> optimizer;
    std::unique_ptr<Session> session;
    explicit Two(const std::string& path) {
      torch::OrderedDict<std::string, Tensor> trained;
      for (const char* name : {"a", "b"}) {
        modules::add_lora(*model, modules::LoraOptions(2).targets({"up"}).name(name));
        for (const auto& item : modules::trainable(*model)) trained.insert(item.key(), item.value());
      }
      model->norm->eval();
      optimizer = std::make_unique<FusedAdamW>(trained, FusedAdamWOptions(0.05));
      session = std::make_unique<Session>(*model, *optimizer);
      session->use(Checkpoints(CheckpointsOptions(path).every(100)));
    }
  };
  const auto train = [](Two& two, int64_t until) {
    while (two.session->progress().step < until) {
      auto [x] = two.session->begin(batch(two.session->progress().step));
      two.session->backward(two.model->forward(x).square().mean());
      two.session->step();
    }
  };
  Two first(folder.path("run")), unbroken(folder.path("unbroken"));
  for (Two* two : {&first, &unbroken}) {
    train(*two, 2);  // "b", which was added last
    modules::set_adapter(*two->model, "a");
    train(*two, 4);
  }
  first.session->finish();
  Two second(folder.path("run"));
  CHECK_THAT(message_of<Error>([&] { second.session->resume(); }),
             ContainsSubstring("\"up\"") && ContainsSubstring("\"a\"") && ContainsSubstring("\"b\"") &&
                 ContainsSubstring("set_adapter"));
  modules::set_adapter(*second.model, "a");
  REQUIRE(second.session->resume() == 4);
  train(unbroken, 6);
  train(second, 6);
  CHECK(same_bits(unbroken.model->forward(batch(50)), second.model->forward(batch(50))));
}

TEST_CASE("running statistics that went on with an adapter are saved with it", "[lora][adapter_files]") {
  const TemporaryFolder folder;
  NormNet model = base_model();
  modules::add_lora(*model, modules::LoraOptions(2).targets({"up", "down"}));
  FusedAdamW optimizer(modules::trainable(*model), FusedAdamWOptions(0.05));
  for (int64_t step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    model->forward(batch(step)).square().mean().backward();
    optimizer.step();
  }
  model->eval();
  save_adapter(*model, folder.path("a"));
  CHECK(config_in(folder.path("a")).at("modules_to_save") == json({"norm"}));
  NormNet other = base_model();
  load_adapter(*other, folder.path("a"));
  other->eval();
  CHECK(same_bits(other->forward(batch(50)), model->forward(batch(50))));
  // Its weights took no part in training, and do not now.
  CHECK_FALSE(other->norm->weight.requires_grad());
  CHECK(modules::trainable(*other).size() == 4);
}

TEST_CASE("a merge whose sum the weight's dtype cannot hold is refused by name", "[lora]") {
  FileNet model;
  model->to(torch::kHalf);
  modules::add_lora(*model, modules::LoraOptions(1).targets({"block.up", "down"}));
  {
    const torch::NoGradGuard no_grad;
    for (const auto& item : modules::trainable(*model)) item.value().fill_(1);
    model->down->weight[3][5] = 65504;
    model->down->adapter("default")->B.mul_(100);
  }
  const ModelState before = state_of_model(*model);
  CHECK_THAT(message_of<Error>([&] { modules::merge(*model); }), ContainsSubstring("weight of down") &&
                                                                     ContainsSubstring("Half") &&
                                                                     ContainsSubstring("1 element"));
  CHECK(changed_since(*model, before) == "");
  CHECK_FALSE(model->block->up->is_merged());
  CHECK_FALSE(model->down->is_merged());
  model->to(torch::kBFloat16);
  modules::merge(*model);
  CHECK(model->down->weight[3][5].item<double>() > 65504);
}

}  // namespace pacer::testing::adapter_state
