// What load_adapter refuses: options, matrices, models and files. Each refusal changes nothing.
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>

#include <nlohmann/json.hpp>

#include <pacer/checkpoints/adapter_files.h>

#include "support/catch.h"
#include "support/checkpoints/adapter_samples.h"
#include "support/checkpoints/failed_loads.h"
#include "support/message_of.h"
#include "support/samples.h"

namespace pacer::testing::adapter_refusals {
namespace {

using nlohmann::json;

void check_load_refused(FileNet& model, const std::string& folder, const Names& parts,
                        const LoadAdapterOptions& options = {}) {
  check_load_fails(*model, parts, [&] { load_adapter(*model, folder, options); });
}

void put_config(const std::string& folder, const json& config) {
  put_content(folder + "/adapter_config.json", config.dump());
}

}  // namespace

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
  check("use_dora", true, {"no lora_magnitude_vector", "use_dora"});
  check("bias", "all", {"bias \"all\""});
  check("bias", "lora_only", {"bias \"lora_only\""});
  check("lora_bias", true, {"\"lora_bias\""});
  check("modules_to_save", json({"head"}), {"\"head\"", "no tensor"});
  check("rank_pattern", {{"block.up", 4}}, {"block.up", "r of 4"});
  check("rank_pattern", {{"block.up", 0}}, {"rank_pattern has 0"});
  check("rank_pattern", {{"up|down", 3}}, {"\"up|down\"", "\"rank_pattern\"", "more than a name"});
  check("alpha_pattern", {{"block.up", -4}}, {"alpha_pattern has -4"});
  check("alpha_pattern", {{"(a+)+", 4}}, {"\"(a+)+\"", "\"alpha_pattern\""});
  check("alpha_pattern", {{"a\\w", 4}}, {"\"alpha_pattern\""});
  check("alpha_pattern", {{"up\\", 4}}, {"\"alpha_pattern\""});
  check("alpha_pattern", {{"", 4}}, {"\"alpha_pattern\""});
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
        {"\"" + layer + "\"", "no pacer::modules::Linear of the model"});
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
}

TEST_CASE("an adapter that is there already must be the same one", "[lora][adapter_files]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("a");
  FileNet source = adapted(some_options());
  save_adapter(*source, path);
  const auto check = [&](const modules::LoraOptions& options, const Names& parts) {
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
  modules::merge(*merged);
  check_load_refused(merged, path, {"merged", "unmerge()"});
  check_load_refused(merged, path, {"merged"}, LoadAdapterOptions().name("second"));
}

TEST_CASE("files that are missing, cut or changed anywhere are refused and change nothing",
          "[lora][adapter_files]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("a"), file = path + "/adapter_model.safetensors",
                    config = path + "/adapter_config.json";
  FileNet fresh, source = adapted(modules::LoraOptions(1).targets({"down"}));
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
    if (!message_of<Error>([&] { load_adapter(*target, path); }).empty())
      REQUIRE(changed_since(*target, before) == "");
  }
}

}  // namespace pacer::testing::adapter_refusals
