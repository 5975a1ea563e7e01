// save_adapter and load_adapter: round trips, what PEFT wrote, what is refused, and that a failed load or
// save changes nothing.
#include <cmath>
#include <filesystem>
#include <limits>

#include <nlohmann/json.hpp>

#include <pacer/core/crc32c.h>
#include <pacer/core/safetensors.h>
#include <pacer/schedulers/adapter_files.h>
#include <pacer/schedulers/detail/adapter_config.h>

#include "support/catch.h"
#include "support/samples.h"
#include "support/weight_files.h"

namespace pacer::testing::adapter_files {
namespace {

using Catch::Matchers::ContainsSubstring;
using Names = std::vector<std::string>;
using nlohmann::json;

const std::string kPeftAdapter = std::string(PACER_TEST_DATA) + "/peft_adapter";

// A FileNet with an adapter whose matrices are all random.
FileNet adapted(const nn::LoraOptions& options, uint64_t seed = 1) {
  torch::manual_seed(seed);
  FileNet model;
  nn::add_lora(*model, options);
  const torch::NoGradGuard no_grad;
  for (const auto& [name, tensor] : detail::model_tensors(*model)) {
    if (name.find(".lora_") != std::string::npos) tensor.normal_();
  }
  return model;
}

nn::LoraOptions some_options() {
  return nn::LoraOptions(3).alpha(6.5).dropout(0.25).rslora(true).targets({"block.up", "block.down"});
}

void copy_base(torch::nn::Module& to, const torch::nn::Module& from) {
  const torch::NoGradGuard no_grad;
  const NamedTensors source = detail::model_tensors(from);
  for (const auto& [name, tensor] : detail::model_tensors(to)) tensor.copy_(source.at(name));
}

Tensor probe() { return torch::arange(0, 4 * 64).to(torch::kFloat).view({4, 64}).sin(); }

void check_load_refused(FileNet& model, const std::string& folder, const Names& parts,
                        const LoadAdapterOptions& options = {}) {
  const ModelState before = state_of_model(*model);
  const std::string message = error_of([&] { load_adapter(*model, folder, options); });
  for (const std::string& part : parts) CHECK_THAT(message, ContainsSubstring(part));
  CHECK(changed_since(*model, before) == "");
}

json config_in(const std::string& folder) { return json::parse(content_of(folder + "/adapter_config.json")); }
void put_config(const std::string& folder, const json& config) {
  put_content(folder + "/adapter_config.json", config.dump());
}

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
  nn::quantize(*other, nn::Nf4Options().targets({"block.*"}));
  load_adapter(*other, folder.path("a"), LoadAdapterOptions().name("first").trainable(false));
  CHECK_FALSE(other->block->up->nf4().is_empty());
  for (const auto& item : other->named_parameters()) CHECK_FALSE(item.value().requires_grad());
  CHECK(nn::adapters(*other) == Names{"first"});
  load_adapter(*other, folder.path("a"), LoadAdapterOptions().name("second"));
  CHECK(nn::adapters(*other) == Names{"first", "second"});
  CHECK_FALSE(other->block->up->adapter("first")->A.requires_grad());
  CHECK(other->block->up->adapter("second")->A.requires_grad());
  save_adapter(*other, folder.path("b"), "first");
  CHECK(content_of(folder.path("b/adapter_model.safetensors")) ==
        content_of(folder.path("a/adapter_model.safetensors")));
  CHECK(content_of(folder.path("b/adapter_config.json")) == content_of(folder.path("a/adapter_config.json")));
  // Loading into the one that is not active leaves both as they are.
  load_adapter(*other, folder.path("a"), LoadAdapterOptions().name("first"));
  CHECK_FALSE(other->block->up->adapter("first")->A.requires_grad());
  CHECK(other->block->up->active_adapter()->options.name() == "second");
}

TEST_CASE("an adapter that PEFT wrote is loaded to its bits", "[lora][adapter_files]") {
  // CRC-32C of the matrices in PEFT 0.21.2, see tests/data/make_fixtures.py.
  PeerNet model;
  CHECK(load_adapter(*model, kPeftAdapter) == Names{"plain", "small"});
  const nn::LoraAdapter plain = model->plain->adapter("default"), small = model->small->adapter("default");
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
  nn::add_lora_to(*model, nn::LoraOptions(1), {"block.up", "down"});  // and not block.down
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

TEST_CASE("what PEFT can do and pacer cannot is refused by its name", "[lora][adapter_files]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("a");
  FileNet model = adapted(some_options()), fresh;
  save_adapter(*model, path);
  const json sound = config_in(path);
  const auto check = [&](const std::string& field, const json& value, const Names& parts) {
    CAPTURE(field, value.dump());
    json config = sound;
    config[field] = value;
    put_config(path, config);
    check_load_refused(fresh, path, parts);
    check_load_refused(model, path, parts);
  };
  check("use_dora", true, {"\"use_dora\", DoRA"});
  check("bias", "all", {"bias \"all\""});
  check("bias", "lora_only", {"bias \"lora_only\""});
  check("lora_bias", true, {"\"lora_bias\""});
  check("modules_to_save", json({"head"}), {"\"modules_to_save\""});
  check("rank_pattern", {{"block.up", 4}}, {"\"rank_pattern\", ranks that differ"});
  check("alpha_pattern", {{"block.up", 4}}, {"\"alpha_pattern\""});
  check("fan_in_fan_out", true, {"\"fan_in_fan_out\""});
  check("megatron_config", {{"tp", 1}}, {"\"megatron_config\""});
  check("layer_replication", json({json({0, 1})}), {"\"layer_replication\""});
  check("trainable_token_indices", json({1}), {"\"trainable_token_indices\""});
  check("target_parameters", json({"x"}), {"\"target_parameters\""});
  check("use_qalora", true, {"\"use_qalora\""});
  check("something_new", {{"on", true}}, {"\"something_new\", which pacer does not have"});
  check("something_new", 1, {"\"something_new\""});
  check("peft_type", "IA3", {"\"IA3\"", "LORA"});
  for (const char* init : {"pissa", "pissa_niter_4", "olora", "loftq", "corda", "lora_ga"}) {
    check("init_lora_weights", init, {"init_lora_weights", init});
  }
  // What is no option of an adapter at all.
  check("r", 0, {"r is 0"});
  check("r", -1, {"whole number"});
  check("r", 2.5, {path});
  check("r", nullptr, {path});
  check("lora_alpha", 0, {"lora_alpha"});
  check("lora_alpha", "8", {path});
  check("lora_dropout", 1, {"lora_dropout"});
  check("lora_dropout", -0.1, {"lora_dropout"});
  check("use_rslora", 1, {path});
  // And what changes nothing here is passed over.
  for (const auto& [field, value] :
       std::vector<std::pair<std::string, json>>{{"layers_to_transform", json({0})},
                                                 {"target_modules", "all-linear"},
                                                 {"task_type", "CAUSAL_LM"},
                                                 {"inference_mode", false},
                                                 {"init_lora_weights", "gaussian"},
                                                 {"init_lora_weights", false},
                                                 {"peft_version", "0.99"},
                                                 {"something_new", nullptr},
                                                 {"something_else", json::object()},
                                                 {"nothing", ""}}) {
    CAPTURE(field);
    json config = sound;
    config[field] = value;
    put_config(path, config);
    FileNet target;
    CHECK(load_adapter(*target, path).size() == 2);
  }
  json without = sound;
  without.erase("peft_type");
  put_config(path, without);
  check_load_refused(fresh, path, {"no peft_type"});
  put_content(path + "/adapter_config.json", R"({"peft_type": "LORA", "r": 3, "r": 3})");
  check_load_refused(fresh, path, {"\"r\" occurs twice"});
}

TEST_CASE("matrices that do not belong to the model are refused by name", "[lora][adapter_files]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("a"), file = path + "/adapter_model.safetensors";
  FileNet model = adapted(some_options()), fresh;
  save_adapter(*model, path);
  const NamedTensors sound = tensors_in(file);
  const std::string up = "base_model.model.block.up.lora_";
  const auto check = [&](const std::function<void(NamedTensors&)>& edit, const Names& parts) {
    NamedTensors tensors = sound;
    edit(tensors);
    put_tensors_in(file, tensors);
    check_load_refused(fresh, path, parts);
    check_load_refused(model, path, parts);
  };
  const auto put = [](const std::string& name, const Tensor& value) {
    return [name, value](NamedTensors& tensors) { tensors[name] = value; };
  };
  check([&](NamedTensors& tensors) { tensors.erase(up + "A.weight"); }, {"only one of the two", "block.up"});
  check([&](NamedTensors& tensors) { tensors.erase(up + "B.weight"); }, {"only one of the two", "block.up"});
  check([](NamedTensors& tensors) { tensors.clear(); }, {"no tensors"});
  check(put("base_model.model.head.weight", torch::ones({8, 10})), {"head.weight", "no matrix"});
  check(put("block.up.lora_A.weight", torch::ones({3, 64})), {"\"block.up.lora_A.weight\"", "no matrix"});
  check(put("base_model.model.lora_A.weight", torch::ones({3, 64})), {"no matrix"});
  check(put(up + "A.default.weight", torch::ones({3, 64})), {"lora_A.default.weight", "no matrix"});
  check(put(up + "magnitude_vector", torch::ones({96})), {"magnitude_vector"});
  for (const std::string layer : {"head", "block", "elsewhere"}) {
    check(
        [&](NamedTensors& tensors) {
          tensors["base_model.model." + layer + ".lora_A.weight"] = torch::ones({3, 10});
          tensors["base_model.model." + layer + ".lora_B.weight"] = torch::ones({8, 3});
        },
        {"\"" + layer + "\"", "no pacer::nn::Linear of the model"});
  }
  check(put(up + "A.weight", torch::ones({3, 65})), {"[3, 65]", "[3, 64]", "block.up"});
  check(put(up + "A.weight", torch::ones({64, 3})), {"[64, 3]", "block.up"});
  check(put(up + "B.weight", torch::ones({96, 2})), {"[96, 2]", "block.up"});
  check(put(up + "A.weight", torch::ones({3, 64}, torch::kInt)), {"I32", "floating-point"});
  for (const double value : {std::numeric_limits<double>::infinity(), std::nan(""), 1e300}) {
    Tensor bad = torch::ones({3, 64}, torch::kDouble);
    bad[2][7] = value;
    check(put(up + "A.weight", bad), {up + "A.weight", "not finite"});
  }
  // Ranks above the smaller side, which pacer does not have.
  put_tensors_in(file, {{"base_model.model.down.lora_A.weight", torch::ones({11, 64})},
                        {"base_model.model.down.lora_B.weight", torch::ones({10, 11})}});
  json config = config_in(path);
  config["r"] = 11;
  put_config(path, config);
  check_load_refused(fresh, path, {"down", "at most 10"});
}

TEST_CASE("an adapter that is there already must be the same one", "[lora][adapter_files]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("a");
  FileNet source = adapted(some_options());
  save_adapter(*source, path);
  const auto check = [&](const nn::LoraOptions& options, const Names& parts) {
    FileNet model = adapted(options);
    check_load_refused(model, path, parts);
  };
  check(some_options().r(2), {"r 3", "r 2", "remove_adapter"});
  check(some_options().alpha(3), {"alpha 6.5", "alpha 3"});
  check(some_options().rslora(false), {"rsLoRA"});
  check(some_options().targets({"block.up"}), {"\"block.down\"", "has none"});
  check(some_options().targets({"block.up", "down"}), {"no adapter of \"down\""});
  // Another dropout is the model's own affair.
  FileNet other = adapted(some_options().dropout(0));
  CHECK(load_adapter(*other, path).size() == 2);
  CHECK(other->block->up->adapter("default")->options.dropout() == 0);
  // Merged: its product is in the weight.
  FileNet merged = adapted(some_options());
  nn::merge(*merged);
  check_load_refused(merged, path, {"merged", "unmerge()"});
  check_load_refused(merged, path, {"merged"}, LoadAdapterOptions().name("second"));
}

TEST_CASE("files that are missing, cut or changed anywhere are refused and change nothing",
          "[lora][adapter_files]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("a"), file = path + "/adapter_model.safetensors",
                    config = path + "/adapter_config.json";
  FileNet fresh, source = adapted(nn::LoraOptions(1).targets({"down"}));
  check_load_refused(fresh, folder.path("absent"), {"adapter_config.json", "No such file"});
  check_load_refused(fresh, "", {"folder"});
  save_adapter(*source, path);
  const std::string tensors = content_of(file), text = content_of(config);
  std::filesystem::remove(file);
  check_load_refused(fresh, path, {"adapter_model.safetensors", "No such file"});
  for (size_t length = 0; length < tensors.size(); length += 5) {
    put_content(file, tensors.substr(0, length));
    check_load_refused(fresh, path, {file});
  }
  put_content(file, tensors);
  for (size_t length = 0; length + 2 < text.size(); ++length) {
    put_content(config, text.substr(0, length));
    check_load_refused(fresh, path, {config});
  }
  Samples samples(9);
  for (int i = 0; i < 600; ++i) {
    std::string a = tensors, b = text;
    std::string& bytes = samples.chance(0.5) ? a : b;
    bytes[static_cast<size_t>(samples.below(static_cast<int64_t>(bytes.size())))] ^=
        static_cast<char>(1 << samples.below(8));
    put_content(file, a);
    put_content(config, b);
    FileNet target;
    const ModelState before = state_of_model(*target);
    if (!error_of([&] { load_adapter(*target, path); }).empty())
      REQUIRE(changed_since(*target, before) == "");
  }
}

TEST_CASE("a save that fails leaves the former adapter, and one that replaces leaves no mixture",
          "[lora][adapter_files]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("a");
  FileNet model;
  CHECK_THAT(error_of([&] { save_adapter(*model, path); }),
             ContainsSubstring("no adapter called \"default\""));
  CHECK_FALSE(std::filesystem::exists(path));
  nn::Linear alone(4, 4);
  alone->add_adapter(nn::LoraOptions(1));
  CHECK_THAT(error_of([&] { save_adapter(*alone, path); }), ContainsSubstring("part of a model"));
  FileNet first = adapted(some_options(), 1), second = adapted(some_options().r(2).alpha(1), 2);
  CHECK_THAT(error_of([&] { save_adapter(*first, ""); }), ContainsSubstring("folder"));
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
  CHECK(error_of([&] { save_adapter(*first, path); }) != "");
  CHECK(content_of(path + "/adapter_model.safetensors") == before);
  CHECK_FALSE(std::filesystem::exists(path + "/adapter_model.safetensors.new"));
  FileNet again;
  load_adapter(*again, path);
  CHECK(again->block->up->adapter("default")->r() == 2);
  std::filesystem::remove(path + "/adapter_config.json.new");
  // It ends between the two files: matrices without options, which nobody takes for an adapter.
  std::filesystem::remove(path + "/adapter_model.safetensors");
  std::filesystem::create_directories(path + "/adapter_model.safetensors/in the way");
  CHECK(error_of([&] { save_adapter(*first, path); }) != "");
  CHECK_FALSE(std::filesystem::exists(path + "/adapter_config.json"));
  std::filesystem::remove_all(path + "/adapter_model.safetensors");
  save_adapter(*first, path);
  FileNet last;
  load_adapter(*last, path);
  CHECK(last->block->up->adapter("default")->r() == 3);
}

}  // namespace pacer::testing::adapter_files
