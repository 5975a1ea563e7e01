// Adapters of convolutions and embeddings in PEFT's files, and models of them in a Session.
#include <memory>

#include <torch/nn/modules/batchnorm.h>
#include <nlohmann/json.hpp>

#include <pacer/checkpoints/adapter_files.h>
#include <pacer/checkpoints/checkpoints.h>
#include <pacer/checkpoints/load_weights.h>
#include <pacer/checkpoints/save_weights.h>
#include <pacer/modules/convolution.h>
#include <pacer/modules/embedding.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/session/session.h>

#include "support/catch.h"
#include "support/checkpoints/adapter_samples.h"
#include "support/checkpoints/failed_loads.h"
#include "support/message_of.h"

namespace pacer::testing::adapter_layers {
namespace {

using Catch::Matchers::ContainsSubstring;
using modules::LoraOptions;
using nlohmann::json;

// Pixels of 5 colours, [N, 6, 6] of indices -> [N, 3].
struct PixelNetImpl : torch::nn::Module {
  PixelNetImpl() {
    colours = register_module("colours", modules::Embedding(5, 4));
    first = register_module("first", modules::Conv2d(torch::nn::Conv2dOptions(4, 8, 3).bias(false)));
    norm = register_module("norm", torch::nn::BatchNorm2d(8));
    second = register_module("second", modules::Conv2d(torch::nn::Conv2dOptions(8, 6, 3).groups(2)));
    head = register_module("head", modules::Linear(6, 3));
  }
  Tensor forward(const Tensor& x) {
    const Tensor image = colours(x).permute({0, 3, 1, 2});
    return head(second(norm(first(image)).relu()).mean({2, 3}));
  }
  modules::Embedding colours = nullptr;
  modules::Conv2d first = nullptr, second = nullptr;
  torch::nn::BatchNorm2d norm = nullptr;
  modules::Linear head = nullptr;
};
TORCH_MODULE(PixelNet);

LoraOptions some_lora() { return LoraOptions(4).alpha(6).targets({"colours", "first", "second", "head"}); }

PixelNet base_model() {
  torch::manual_seed(1);
  return PixelNet();
}

PixelNet adapted_model() {
  PixelNet model = base_model();
  modules::add_lora(*model, some_lora());
  const torch::NoGradGuard no_grad;
  for (const auto& item : modules::trainable(*model)) item.value().normal_(0, 0.3);
  return model;
}

Tensor batch(int64_t step) {
  torch::manual_seed(100 + step);
  return torch::randint(5, {16, 6, 6});
}
// How many pixels have the first three colours.
Tensor target(const Tensor& x) {
  return torch::stack({x.eq(0), x.eq(1), x.eq(2)}, -1).to(torch::kFloat).mean(std::vector<int64_t>{1, 2});
}

// The model with adapters, and the run that trains it.
struct Run {
  PixelNet model = base_model();
  std::unique_ptr<FusedAdamW> optimizer;
  std::unique_ptr<Session> session;

  explicit Run(const std::string& folder) {
    modules::add_lora(*model, some_lora());
    optimizer = std::make_unique<FusedAdamW>(modules::trainable(*model), FusedAdamWOptions(0.01));
    session = std::make_unique<Session>(*model, *optimizer);
    session->use(Checkpoints(CheckpointsOptions(folder).every(100).save_frozen(false)));
  }
  double train(int64_t until) {
    double loss = 0;
    while (session->progress().step < until) {
      const Tensor pixels = batch(session->progress().step);
      auto [x, y] = session->begin(pixels, target(pixels));
      const Tensor error = torch::mse_loss(model->forward(x), y);
      session->backward(error);
      session->step();
      loss = error.item<double>();
    }
    return loss;
  }
};

}  // namespace

TEST_CASE(
    "adapters of convolutions and embeddings have PEFT's names and shapes in its files, and are read back",
    "[lora][adapter_files]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("a");
  PixelNet model = adapted_model();
  modules::set_adapter(*model, "default");
  model->norm->eval();
  save_adapter(*model, path);
  const NamedTensors in_file = tensors_in(path + "/adapter_model.safetensors");
  const std::map<std::string, std::vector<int64_t>> wanted = {
      {"colours.lora_embedding_A", {4, 5}},   {"colours.lora_embedding_B", {4, 4}},
      {"first.lora_A.weight", {4, 4, 3, 3}},  {"first.lora_B.weight", {8, 4, 1, 1}},
      {"second.lora_A.weight", {4, 8, 3, 3}}, {"second.lora_B.weight", {6, 2, 1, 1}},
      {"head.lora_A.weight", {4, 6}},         {"head.lora_B.weight", {3, 4}}};
  for (const auto& [name, shape] : wanted) {
    CAPTURE(name);
    REQUIRE(in_file.count("base_model.model." + name) == 1);
    CHECK(in_file.at("base_model.model." + name).sizes() == shape);
  }
  CHECK(in_file.size() == wanted.size() + 5);  // the batch norm
  CHECK(same_bits(in_file.at("base_model.model.colours.lora_embedding_A"),
                  model->colours->adapter("default")->A));
  const json config = config_in(path);
  CHECK(config.at("target_modules") == json({"colours", "first", "head", "second"}));
  CHECK(config.at("modules_to_save") == json({"norm"}));
  CHECK(config.at("r") == 4);

  PixelNet other = base_model();
  other->norm->eval();
  CHECK(load_adapter(*other, path) == Names{"colours", "first", "head", "second"});
  CHECK(same_bits(other->forward(batch(1)), model->forward(batch(1))));
  CHECK(modules::trainable(*other).size() == 8);
  {
    const torch::NoGradGuard no_grad;
    for (const auto& item : modules::trainable(*other)) item.value().zero_();
  }
  load_adapter(*other, path);  // into the one that is there
  CHECK(same_bits(other->forward(batch(1)), model->forward(batch(1))));
}

TEST_CASE("matrices of another kind or size than a layer's are refused by name", "[lora][adapter_files]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("a"), file = path + "/adapter_model.safetensors";
  PixelNet model = adapted_model(), fresh = base_model();
  save_adapter(*model, path);
  const NamedTensors sound = tensors_in(file);
  const std::string prefix = "base_model.model.";
  const auto check = [&](const std::function<void(NamedTensors&)>& edit, const Names& parts) {
    NamedTensors tensors = sound;
    edit(tensors);
    put_tensors_in(file, tensors);
    for (PixelNet* target : {&model, &fresh}) {
      check_load_fails(**target, parts, [&] { load_adapter(**target, path); });
    }
  };
  const auto move = [&](const std::string& from, const std::string& to) {
    return [from, to, prefix](NamedTensors& tensors) {
      for (const char* matrix : {"A", "B"}) {
        const std::string end = to.find("embedding") == std::string::npos ? ".weight" : "";
        const std::string old_end = from.find("embedding") == std::string::npos ? ".weight" : "";
        tensors[prefix + to + matrix + end] = tensors.at(prefix + from + matrix + old_end);
        tensors.erase(prefix + from + matrix + old_end);
      }
    };
  };
  check(move("colours.lora_embedding_", "colours.lora_"), {"\"colours\", which is one in the model"});
  check(move("head.lora_", "head.lora_embedding_"), {"\"head\", which is none in the model"});
  check([&](NamedTensors& tensors) { tensors.erase(prefix + "colours.lora_embedding_B"); },
        {"only one of the two", "colours"});
  check(
      [&](NamedTensors& tensors) {
        tensors[prefix + "first.lora_embedding_A"] = torch::ones({4, 4});
      },
      {"of a layer and of an embedding", "first"});
  check(
      [&](NamedTensors& tensors) {
        tensors[prefix + "first.lora_A.weight"] = torch::ones({4, 4, 3});
      },
      {"[4, 4, 3]", "[4, 4, 3, 3]", "\"first\""});
  check(
      [&](NamedTensors& tensors) {
        tensors[prefix + "second.lora_B.weight"] = torch::ones({6, 4, 1, 1});
      },
      {"[6, 4, 1, 1]", "[6, 2, 1, 1]", "\"second\""});
  put_tensors_in(file, sound);
  json config = config_in(path);
  config["rank_pattern"] = {{"second", 3}};
  put_content(path + "/adapter_config.json", config.dump());
  check_load_fails(*fresh, {"\"second\", which in the model has 2 groups"},
                   [&] { load_adapter(*fresh, path); });
}

TEST_CASE("a Session trains adapters of a net with convolutions and batch norm, resumes it and saves them",
          "[lora][session]") {
  const TemporaryFolder folder;
  Run unbroken(folder.path("unbroken")), first(folder.path("run"));
  const NamedTensors before = state_of_model(*first.model).values;
  const double at_first = first.train(1);
  CHECK(first.train(40) < 0.3 * at_first);
  for (const auto& [name, tensor] : detail::model_tensors(*first.model)) {
    CAPTURE(name);
    const bool changes = name.find("lora_") != std::string::npos ||
                         name.find("running_") != std::string::npos ||
                         name.find("num_batches") != std::string::npos;
    CHECK(same_bits(tensor, before.at(name)) == !changes);
  }
  first.session->finish();
  Run second(folder.path("run"));
  REQUIRE(second.session->resume() == 40);
  unbroken.train(45);
  second.train(45);
  unbroken.model->eval();
  second.model->eval();
  const Tensor wanted = unbroken.model->forward(batch(50));
  CHECK(same_bits(second.model->forward(batch(50)), wanted));

  save_adapter(*second.model, folder.path("adapter"));
  PixelNet other = base_model();
  load_adapter(*other, folder.path("adapter"));
  other->eval();
  CHECK(same_bits(other->forward(batch(50)), wanted));
}

TEST_CASE(
    "weights of convolutions and embeddings are saved without their adapters, and as they were before a "
    "merge",
    "[lora]") {
  const TemporaryFolder folder;
  PixelNet model = adapted_model();
  modules::remove_adapter(*model, "default");
  modules::add_lora(*model, some_lora().targets({"colours", "first"}));
  const torch::NoGradGuard no_grad;
  for (const auto& item : modules::trainable(*model)) item.value().normal_(0, 0.3);
  const Tensor wanted = (model->eval(), model->forward(batch(3)));
  save_weights(*model, folder.path("base.safetensors"));
  PixelNet plain = base_model();
  load_weights(*plain, folder.path("base.safetensors"));
  CHECK(same_bits(plain->first->weight, model->first->weight));
  modules::merge(*model);
  CHECK(distance(model->forward(batch(3)), wanted) < 1e-5);
  CHECK_THAT(message_of<Error>([&] { load_weights(*model, folder.path("base.safetensors")); }),
             ContainsSubstring("is merged"));
  save_weights(*model, folder.path("merged.safetensors"));
  load_weights(*plain, folder.path("merged.safetensors"));
  plain->eval();
  CHECK(same_bits(plain->forward(batch(3)), model->forward(batch(3))));
}

}  // namespace pacer::testing::adapter_layers
