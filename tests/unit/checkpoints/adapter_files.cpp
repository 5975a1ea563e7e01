// save_adapter and load_adapter: round trips, what PEFT wrote, and that a failed save changes nothing.
#include <filesystem>

#include <nlohmann/json.hpp>

#include <pacer/checkpoints/adapter_files.h>
#include <pacer/checkpoints/detail/adapter_config.h>
#include <pacer/files/crc32c.h>

#include "support/catch.h"
#include "support/checkpoints/adapter_samples.h"
#include "support/message_of.h"

namespace pacer::testing::adapter_files {
namespace {

using Catch::Matchers::ContainsSubstring;
using nlohmann::json;

const std::string kPeftAdapter = std::string(PACER_TEST_DATA) + "/peft_adapter";

void copy_base(torch::nn::Module& to, const torch::nn::Module& from) {
  const torch::NoGradGuard no_grad;
  const NamedTensors source = detail::model_tensors(from);
  for (const auto& [name, tensor] : detail::model_tensors(to)) tensor.copy_(source.at(name));
}

Tensor probe() { return torch::arange(0, 4 * 64).to(torch::kFloat).view({4, 64}).sin(); }

uint32_t crc_of_values(const Tensor& tensor) {
  const Tensor dense = tensor.detach().contiguous();
  return crc32c({static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()});
}

}  // namespace

TEST_CASE("an adapter is saved under PEFT's names and comes back to the bit", "[lora][adapter_files]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("deep/adapter");
  FileNet model = adapted(some_options());
  save_adapter(*model, path);

  const NamedTensors tensors = tensors_in(path + "/adapter_model.safetensors");
  REQUIRE(tensors.size() == 4);
  CHECK(same_bits(tensors.at("base_model.model.block.up.lora_A.weight"),
                  model->block->up->adapter("default")->A));
  CHECK(same_bits(tensors.at("base_model.model.block.up.lora_B.weight"),
                  model->block->up->adapter("default")->B));
  CHECK(tensors.at("base_model.model.block.down.lora_A.weight").sizes() == at::IntArrayRef({3, 96}));
  const json config = config_in(path);
  CHECK(config.at("peft_type") == "LORA");
  CHECK(config.at("r") == 3);
  CHECK(config.at("lora_alpha") == 6.5);
  CHECK(config.at("lora_dropout") == 0.25);
  CHECK(config.at("use_rslora") == true);
  CHECK(config.at("bias") == "none");
  CHECK(config.at("fan_in_fan_out") == false);
  CHECK(config.at("task_type").is_null());
  CHECK(config.at("target_modules") == json({"block.down", "block.up"}));

  // Into a model without adapters: exactly these layers, all else frozen, the same results.
  FileNet other;
  copy_base(*other, *model);
  CHECK(load_adapter(*other, path + "/") == Names{"block.down", "block.up"});
  CHECK(same_bits(other->block->up->adapter("default")->B, model->block->up->adapter("default")->B));
  CHECK(other->block->up->adapter("default")->options.dropout() == 0.25);
  CHECK(other->block->up->adapter("default")->scale() == model->block->up->adapter("default")->scale());
  CHECK(other->down->adapters().empty());
  for (const auto& item : other->named_parameters()) {
    CHECK(item.value().requires_grad() == (item.key().find("lora_") != std::string::npos));
  }
  model->eval();
  other->eval();
  CHECK(same_bits(other->forward(probe()), model->forward(probe())));

  // Into a model that has it: in its own memory.
  FileNet present = adapted(some_options(), 2);
  const ModelState before = state_of_model(*present);
  load_adapter(*present, path);
  const ModelState after = state_of_model(*present);
  CHECK(after.facts == before.facts);
  for (const auto& [name, value] : after.values) {
    CAPTURE(name);
    const bool is_adapter = name.find("lora_") != std::string::npos;
    CHECK(same_bits(value, before.values.at(name)) == !is_adapter);
    if (is_adapter) CHECK(same_bits(value, detail::model_tensors(*model).at(name)));
  }
}

TEST_CASE("adapters go by their names, and over weights in 4 bits", "[lora][adapter_files]") {
  const TemporaryFolder folder;
  FileNet model = adapted(some_options());
  save_adapter(*model, folder.path("a"));
  FileNet other;
  modules::quantize(*other, modules::Nf4Options().targets({"block.*"}));
  load_adapter(*other, folder.path("a"), LoadAdapterOptions().name("first").trainable(false));
  CHECK_FALSE(other->block->up->nf4().is_empty());
  for (const auto& item : other->named_parameters()) CHECK_FALSE(item.value().requires_grad());
  CHECK(modules::adapters(*other) == Names{"first"});
  load_adapter(*other, folder.path("a"), LoadAdapterOptions().name("second"));
  CHECK(modules::adapters(*other) == Names{"first", "second"});
  CHECK_FALSE(other->block->up->adapter("first")->A.requires_grad());
  CHECK(other->block->up->adapter("second")->A.requires_grad());
  save_adapter(*other, folder.path("b"), "first");
  CHECK(content_of(folder.path("b/adapter_model.safetensors")) ==
        content_of(folder.path("a/adapter_model.safetensors")));
  CHECK(content_of(folder.path("b/adapter_config.json")) == content_of(folder.path("a/adapter_config.json")));
  // Loading into the one that is not active leaves both as they are.
  load_adapter(*other, folder.path("a"), LoadAdapterOptions().name("first"));
  CHECK_FALSE(other->block->up->adapter("first")->A.requires_grad());
  CHECK(other->block->up->active_adapters().at(0)->options.name() == "second");
}

TEST_CASE("an adapter that PEFT wrote is loaded to its bits", "[lora][adapter_files]") {
  // CRC-32C of the matrices in PEFT 0.21.2, see tests/data/make_fixtures.py.
  PeerNet model;
  CHECK(load_adapter(*model, kPeftAdapter) == Names{"plain", "small"});
  const modules::LoraAdapter plain = model->plain->adapter("default"),
                             small = model->small->adapter("default");
  CHECK(plain->r() == 2);
  CHECK(plain->alpha() == 6);
  CHECK(plain->options.dropout() == 0.25);
  CHECK_FALSE(plain->options.rslora());
  CHECK(crc_of_values(plain->A) == 0xef7aff39);
  CHECK(crc_of_values(plain->B) == 0xac97f3b1);
  CHECK(crc_of_values(small->A) == 0x79884576);
  CHECK(crc_of_values(small->B) == 0x7ec52976);
  CHECK(model->nested->adapters().empty());

  // Through links, as the cache of Hugging Face has them, in 16 bits.
  const TemporaryFolder folder;
  NamedTensors tensors = tensors_in(kPeftAdapter + "/adapter_model.safetensors");
  for (auto& item : tensors) item.second = item.second.to(at::kBFloat16);
  put_tensors_in(folder.path("blob"), tensors);
  std::filesystem::create_symlink("blob", folder.path("adapter_model.safetensors"));
  std::filesystem::create_symlink(kPeftAdapter + "/adapter_config.json", folder.path("adapter_config.json"));
  PeerNet other;
  load_adapter(*other, folder.path());
  CHECK(same_bits(other->plain->adapter("default")->A, plain->A.detach().to(at::kBFloat16).to(at::kFloat)));
}

TEST_CASE("names that PEFT would take for others' last parts are written as an expression",
          "[lora][adapter_files]") {
  const TemporaryFolder folder;
  FileNet model;
  modules::add_lora_to(*model, modules::LoraOptions(1), {"block.up", "down"});  // and not block.down
  save_adapter(*model, folder.path("a"));
  CHECK(config_in(folder.path("a")).at("target_modules") == R"((?:block\.up|down))");
  FileNet other;
  CHECK(load_adapter(*other, folder.path("a")) == Names{"block.up", "down"});
  using detail::adapter_config_text;
  const auto targets = [](const Names& layers, const Names& modules) {
    return json::parse(adapter_config_text({}, layers, modules)).at("target_modules");
  };
  CHECK(targets({"b", "a"}, {"a", "b", "c.bb"}) == json({"a", "b"}));
  CHECK(targets({"a.b"}, {"a.b", "x.a.b"}) == R"((?:a\.b))");
  CHECK(targets({"a-b", "0"}, {"a-b", "0", "1.0"}) == R"((?:0|a\-b))");
  CHECK(targets({"a\"\n"}, {"a\"\n"}) == json({"a\"\n"}));
}

TEST_CASE("a save that fails leaves the former adapter, and one that replaces leaves no mixture",
          "[lora][adapter_files]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("a");
  FileNet model;
  CHECK_THAT(message_of<Error>([&] { save_adapter(*model, path); }),
             ContainsSubstring("no adapter called \"default\""));
  CHECK_FALSE(std::filesystem::exists(path));
  modules::Linear alone(4, 4);
  alone->add_adapter(modules::LoraOptions(1));
  CHECK_THAT(message_of<Error>([&] { save_adapter(*alone, path); }), ContainsSubstring("part of a model"));
  FileNet first = adapted(some_options(), 1), second = adapted(some_options().r(2).alpha(1), 2);
  CHECK_THAT(message_of<Error>([&] { save_adapter(*first, ""); }), ContainsSubstring("folder"));
  save_adapter(*first, path);
  put_content(path + "/README.md", "the user's own");
  save_adapter(*second, path);
  CHECK(content_of(path + "/README.md") == "the user's own");
  FileNet loaded;
  load_adapter(*loaded, path);
  CHECK(loaded->block->up->adapter("default")->r() == 2);
  CHECK(std::distance(std::filesystem::directory_iterator(path), std::filesystem::directory_iterator()) == 3);
  // The second file cannot be written: nothing was touched.
  const std::string before = content_of(path + "/adapter_model.safetensors");
  std::filesystem::create_directory(path + "/adapter_config.json.new");
  CHECK(message_of<Error>([&] { save_adapter(*first, path); }) != "");
  CHECK(content_of(path + "/adapter_model.safetensors") == before);
  CHECK_FALSE(std::filesystem::exists(path + "/adapter_model.safetensors.new"));
  FileNet again;
  load_adapter(*again, path);
  CHECK(again->block->up->adapter("default")->r() == 2);
  std::filesystem::remove(path + "/adapter_config.json.new");
  // It ends between the two files: matrices without options, which nobody takes for an adapter.
  std::filesystem::remove(path + "/adapter_model.safetensors");
  std::filesystem::create_directories(path + "/adapter_model.safetensors/in the way");
  CHECK(message_of<Error>([&] { save_adapter(*first, path); }) != "");
  CHECK_FALSE(std::filesystem::exists(path + "/adapter_config.json"));
  std::filesystem::remove_all(path + "/adapter_model.safetensors");
  save_adapter(*first, path);
  FileNet last;
  load_adapter(*last, path);
  CHECK(last->block->up->adapter("default")->r() == 3);
}

}  // namespace pacer::testing::adapter_files
