// What PEFT's files hold beside matrices of one rank: modules that are trained as they are, ranks and alphas
// of single layers, and values that not every dtype can hold.
#include <filesystem>
#include <functional>
#include <map>

#include <nlohmann/json.hpp>

#include <pacer/checkpoints/adapter_files.h>
#include <pacer/checkpoints/load_weights.h>
#include <pacer/checkpoints/save_weights.h>
#include <pacer/core/error.h>

#include "support/catch.h"
#include "support/checkpoints/adapter_samples.h"
#include "support/message_of.h"

namespace pacer::testing::adapter_file_modules {
namespace {

using Catch::Matchers::ContainsSubstring;
using nlohmann::json;

}  // namespace

TEST_CASE("what is trained beside an adapter is saved as PEFT's modules_to_save", "[lora][adapter_files]") {
  const TemporaryFolder folder;
  FileNet model = adapted(some_options());
  for (const Tensor& parameter : model->head->parameters()) parameter.requires_grad_(true);
  {
    const torch::NoGradGuard no_grad;
    model->head->weight.normal_();
    model->head->bias.normal_();
  }
  save_adapter(*model, folder.path("a"));
  CHECK(config_in(folder.path("a")).at("modules_to_save") == json({"head"}));
  const NamedTensors tensors = tensors_in(folder.path("a/adapter_model.safetensors"));
  CHECK(tensors.size() == 6);
  CHECK(same_bits(tensors.at("base_model.model.head.weight"), model->head->weight));

  FileNet other = adapted(some_options(), 1);
  modules::remove_adapter(*other, "default");
  CHECK(load_adapter(*other, folder.path("a")) == Names{"block.down", "block.up"});
  CHECK(same_bits(other->head->bias, model->head->bias));
  CHECK(other->head->weight.requires_grad());
  CHECK_FALSE(other->block->up->weight.requires_grad());
  model->eval();
  other->eval();
  const Tensor x = torch::ones({2, 64});
  CHECK(same_bits(other->forward(x), model->forward(x)));
  // For use alone nothing is trained, and a saved one that is loaded anew keeps what is trained.
  FileNet used;
  load_adapter(*used, folder.path("a"), LoadAdapterOptions().trainable(false));
  for (const auto& item : used->named_parameters()) CHECK_FALSE(item.value().requires_grad());
  save_adapter(*other, folder.path("b"));
  CHECK(tensors_in(folder.path("b/adapter_model.safetensors")).size() == 6);

  SECTION("of which a model has one for all of its adapters") {
    FileNet several;
    modules::add_lora(*several, modules::LoraOptions(2).targets({"down"}).name("first"));
    const ModelState before = state_of_model(*several);
    CHECK_THAT(message_of<Error>(
                   [&] { load_adapter(*several, folder.path("a"), LoadAdapterOptions().name("second")); }),
               ContainsSubstring("\"head.bias\"") && ContainsSubstring("\"first\""));
    CHECK(changed_since(*several, before) == "");
  }
  SECTION("whose file must have all of it, in the model's shapes") {
    const auto refused = [&](const std::function<void(NamedTensors&)>& edit, const std::string& part) {
      NamedTensors edited = tensors;
      edit(edited);
      put_tensors_in(folder.path("a/adapter_model.safetensors"), edited);
      FileNet target;
      const ModelState before = state_of_model(*target);
      CHECK_THAT(message_of<Error>([&] { load_adapter(*target, folder.path("a")); }),
                 ContainsSubstring(part));
      CHECK(changed_since(*target, before) == "");
    };
    const std::string weight = "base_model.model.head.weight", bias = "base_model.model.head.bias";
    refused(
        [&](NamedTensors& t) {
          t.erase(weight);
          t.erase(bias);
        },
        "\"head\"");
    refused([&](NamedTensors& t) { t[weight] = torch::ones({8, 11}); }, "[8, 11]");
    refused([&](NamedTensors& t) { t[weight] = torch::ones({8, 10}, torch::kInt); }, "head.weight");
    refused([&](NamedTensors& t) { t[weight][0][0] = NAN; }, "not finite");
    refused([&](NamedTensors& t) { t["base_model.model.head.scale"] = torch::ones({8}); }, "head.scale");
    refused(
        [&](NamedTensors& t) {
          t["base_model.model.down.weight"] = torch::ones({10, 64});
        },
        "down.weight");
  }
}

TEST_CASE("what is trained where PEFT's files have no place for it is an error that names it",
          "[lora][adapter_files]") {
  const TemporaryFolder folder;
  FileNet model = adapted(some_options());
  model->block->up->bias.requires_grad_(true);
  CHECK_THAT(message_of<Error>([&] { save_adapter(*model, folder.path("a")); }),
             ContainsSubstring("\"block.up.bias\""));
  struct RootImpl : FileNetImpl {
    RootImpl() { scale = register_parameter("scale", torch::ones({1})); }
    Tensor scale;
  };
  RootImpl root;
  modules::add_lora(root, modules::LoraOptions(2).targets({"down"}));
  root.scale.requires_grad_(true);
  CHECK_THAT(message_of<Error>([&] { save_adapter(root, folder.path("a")); }),
             ContainsSubstring("\"scale\""));
  CHECK_FALSE(std::filesystem::exists(folder.path("a")));
}

TEST_CASE("values of a file that the adapter's dtype cannot hold are refused by name",
          "[lora][adapter_files]") {
  const TemporaryFolder folder;
  FileNet source = adapted(some_options()), model = adapted(some_options(), 2);
  {
    const torch::NoGradGuard no_grad;
    source->block->up->adapter("default")->A[0][0] = 1e6;
  }
  save_adapter(*source, folder.path("a"));
  model->to(torch::kHalf);
  const ModelState before = state_of_model(*model);
  CHECK_THAT(message_of<Error>([&] { load_adapter(*model, folder.path("a")); }),
             ContainsSubstring("block.up.lora_A") && ContainsSubstring("Half"));
  CHECK(changed_since(*model, before) == "");
}

TEST_CASE("ranks and alphas that differ between layers are loaded and saved as PEFT does",
          "[lora][adapter_files]") {
  // The scale of a layer is its alpha by its rank; a pattern names a layer by its last parts, and the first
  // that fits counts.
  const TemporaryFolder folder;
  const std::string path = folder.path("a");
  std::filesystem::create_directories(path);
  torch::manual_seed(3);
  NamedTensors tensors;
  const std::map<std::string, std::array<int64_t, 3>> layers = {
      {"block.up", {5, 64, 96}}, {"block.down", {2, 96, 64}}, {"down", {11, 64, 10}}};  // r, in, out
  for (const auto& [layer, sizes] : layers) {
    const std::string name = "base_model.model." + layer + ".lora_";
    tensors[name + "A.weight"] = torch::randn({sizes[0], sizes[1]});
    tensors[name + "B.weight"] = torch::randn({sizes[2], sizes[0]});
  }
  put_tensors_in(path + "/adapter_model.safetensors", tensors);
  put_content(path + "/adapter_config.json",
              R"({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_rslora": false,
                  "rank_pattern": {"block\\.up": 5, "block.down": 2, "down": 11},
                  "alpha_pattern": {"up": 15, "block.down": 3}})");
  FileNet model;
  CHECK(load_adapter(*model, path) == Names{"block.down", "block.up", "down"});
  CHECK(model->block->up->adapter("default")->scale() == 3);
  CHECK(model->block->down->adapter("default")->scale() == 1.5);
  CHECK(model->down->adapter("default")->scale() == 4.0 / 11);
  CHECK(model->down->adapter("default")->r() == 11);  // above the smaller side
  const auto dense = [&](const std::string& layer, double scale, const Tensor& weight) {
    const std::string name = "base_model.model." + layer + ".lora_";
    return weight.detach() + scale * tensors.at(name + "B.weight").matmul(tensors.at(name + "A.weight"));
  };
  const Tensor x = torch::randn({3, 64});
  const Tensor wanted = x.matmul(dense("down", 4.0 / 11, model->down->weight).t()) + model->down->bias;
  CHECK(distance(model->down->forward(x), wanted) < 1e-3);

  save_adapter(*model, folder.path("b"));
  FileNet again;
  CHECK(load_adapter(*again, folder.path("b")).size() == 3);
  for (const auto& [name, tensor] : tensors_in(folder.path("b/adapter_model.safetensors"))) {
    CHECK(same_bits(tensor, tensors.at(name)));
  }
  CHECK(again->block->up->adapter("default")->scale() == 3);
  CHECK(again->down->adapter("default")->scale() == 4.0 / 11);
  load_adapter(*again, path);  // into the one that is there
  // A pattern that is no name.
  put_content(path + "/adapter_config.json",
              "{\"peft_type\": \"LORA\", \"r\": 2, \"alpha_pattern\": {\"block.(up|down)\": 3}}");
  CHECK_THAT(message_of<Error>([&] { load_adapter(*again, path); }), ContainsSubstring("alpha_pattern"));
}

}  // namespace pacer::testing::adapter_file_modules
