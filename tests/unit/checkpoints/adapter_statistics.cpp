// Running statistics that go on beside an adapter: which modules save_adapter keeps for them, and that
// load_adapter takes what it wrote.
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>

#include <pacer/checkpoints/adapter_files.h>
#include <pacer/optimizers/fused_adam.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/checkpoints/adapter_samples.h"
#include "support/message_of.h"
#include "support/session/mistakes.h"

namespace pacer::testing::adapter_statistics {
namespace {

using Catch::Matchers::ContainsSubstring;
using nlohmann::json;

// The names of a ResNet: a norm of the model, and one of a block whose name ends in it. x [N, 8] -> [N, 8].
struct ResidualNetImpl : torch::nn::Module {
  struct BlockImpl : torch::nn::Module {
    BlockImpl() {
      up = register_module("up", modules::Linear(8, 8));
      bn1 = register_module("bn1", torch::nn::BatchNorm1d(8));
    }
    Tensor forward(const Tensor& x) { return x + bn1(up(x)); }
    modules::Linear up = nullptr;
    torch::nn::BatchNorm1d bn1 = nullptr;
  };
  TORCH_MODULE(Block);
  ResidualNetImpl() {
    bn1 = register_module("bn1", torch::nn::BatchNorm1d(8));
    layer1 = register_module("layer1", torch::nn::Sequential(Block(), Block()));
  }
  Tensor forward(const Tensor& x) { return layer1->forward(bn1(x)); }
  torch::nn::BatchNorm1d bn1 = nullptr;
  torch::nn::Sequential layer1 = nullptr;
};
TORCH_MODULE(ResidualNet);

// A model with statistics of its own, which count its batches, and in a module above the adapted layer.
struct CountedNetImpl : torch::nn::Module {
  struct BlockImpl : torch::nn::Module {
    BlockImpl() {
      up = register_module("up", modules::Linear(8, 8));
      running_var = register_buffer("running_var", torch::ones({8}));
    }
    modules::Linear up = nullptr;
    Tensor running_var;
  };
  TORCH_MODULE(Block);
  CountedNetImpl() {
    running_mean = register_buffer("running_mean", torch::zeros({8}));
    block = register_module("block", Block());
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
  }
  Tensor running_mean;
  Block block = nullptr;
  torch::nn::BatchNorm1d norm = nullptr;
};
TORCH_MODULE(CountedNet);

}  // namespace

TEST_CASE("a folder with norms whose names end alike is loaded, with all of their statistics",
          "[lora][adapter_files]") {
  const TemporaryFolder folder;
  torch::manual_seed(1);
  ResidualNet model;
  modules::add_lora(*model, modules::LoraOptions(2).targets({"up"}));
  for (int i = 0; i < 3; ++i) model->forward(torch::randn({16, 8}) * 2 + 1);
  save_adapter(*model, folder.path("a"));
  CHECK(config_in(folder.path("a")).at("modules_to_save") == json({"bn1", "layer1.0.bn1", "layer1.1.bn1"}));

  ResidualNet other;
  CHECK(load_adapter(*other, folder.path("a")) == Names{"layer1.0.up", "layer1.1.up"});
  const NamedTensors loaded = detail::model_tensors(*other);
  for (const auto& [name, tensor] : detail::model_tensors(*model)) {
    if (name.find("bn1.") != std::string::npos) CHECK(same_bits(loaded.at(name), tensor));
  }

  // The module that no tensor is of is named, though another one's name begins as it does.
  NamedTensors tensors = tensors_in(folder.path("a/adapter_model.safetensors"));
  for (auto item = tensors.begin(); item != tensors.end();) {
    const bool goes = item->first.find("layer1.1.bn1.") != std::string::npos;
    item = goes ? tensors.erase(item) : std::next(item);
  }
  put_tensors_in(folder.path("a/adapter_model.safetensors"), tensors);
  CHECK_THAT(message_of<FileError>([&] { load_adapter(*other, folder.path("a")); }),
             ContainsSubstring("\"layer1.1.bn1\"") && ContainsSubstring("no tensor"));
}

TEST_CASE("statistics that PEFT's files have no place for are told of and stay out of them",
          "[lora][adapter_files]") {
  const TemporaryFolder folder;
  CountedNet model;
  modules::add_lora(*model, modules::LoraOptions(2).targets({"up"}));
  const std::string heard = heard_of([&] { save_adapter(*model, folder.path("a")); });
  CHECK(fault_of(heard, {"\"running_mean\"", "\"block.running_var\"", "in no file", "save_weights"}) == "");
  CHECK(config_in(folder.path("a")).at("modules_to_save") == json({"norm"}));
  const NamedTensors tensors = tensors_in(folder.path("a/adapter_model.safetensors"));
  CHECK(tensors.count("base_model.model.running_mean") == 0);
  CHECK(tensors.count("base_model.model.norm.running_mean") == 1);
  CountedNet other;
  CHECK(load_adapter(*other, folder.path("a")) == Names{"block.up"});

  SECTION("and nothing is said of a model whose statistics all have one") {
    ResidualNet quiet;
    modules::add_lora(*quiet, modules::LoraOptions(2).targets({"up"}));
    CHECK(heard_of([&] { save_adapter(*quiet, folder.path("b")); }) == "");
  }
}

}  // namespace pacer::testing::adapter_statistics
