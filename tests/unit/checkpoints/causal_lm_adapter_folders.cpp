// Adapters of a CausalLm in folders as PEFT has them for transformers' models: there queries, keys and values, and both
// halves of SwiGLU, have adapters of their own.
#include <cmath>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <pacer/checkpoints/adapter_files.h>
#include <pacer/checkpoints/load_weights.h>
#include <pacer/checkpoints/save_weights.h>
#include <pacer/modules/causal_lm.h>
#include <pacer/modules/lora.h>
#include <pacer/modules/nf4.h>

#include "support/catch.h"
#include "support/checkpoints/adapter_samples.h"
#include "support/checkpoints/failed_loads.h"
#include "support/checkpoints/weight_files.h"
#include "support/message_of.h"

namespace pacer::testing::causal_lm_adapter_folders {
namespace {

using Catch::Matchers::ContainsSubstring;
using modules::CausalLm;
using modules::CausalLmOptions;
using modules::LoraOptions;
using nlohmann::json;

const std::string kPrefix = "base_model.model.", kLayer = "model.layers.0.";

CausalLm base_model(bool tied = false, uint64_t seed = 1) {
  torch::manual_seed(seed);
  return CausalLm(CausalLmOptions(40, 16, 2, 4).ffn(24).kv_heads(2).init_std(0.2).tied(tied));
}

LoraOptions some_adapters() { return LoraOptions(3).alpha(6).targets({"layers.**"}); }

void randomize(CausalLm& model) {
  torch::manual_seed(7);
  const torch::NoGradGuard no_grad;
  for (const auto& item : modules::trainable(*model)) item.value().normal_(0, 0.2);
}

Tensor some_ids() { return torch::arange(24).view({2, 12}); }

modules::LoraAdapter adapter_of(CausalLm& model, const std::string& layer) {
  return model->named_modules()[layer]->as<modules::LinearImpl>()->adapter("default");
}

// A folder as PEFT writes it, from matrices by their names without prefix.
void put_folder(const std::string& path, const NamedTensors& matrices, json config) {
  std::filesystem::create_directories(path);
  NamedTensors tensors;
  for (const auto& [name, tensor] : matrices) tensors.emplace(kPrefix + name + ".weight", tensor);
  put_tensors_in(path + "/adapter_model.safetensors", tensors);
  config["peft_type"] = "LORA";
  put_content(path + "/adapter_config.json", config.dump());
}

// Both matrices of layers of the first decoder, of r and so many rows.
NamedTensors matrices_of(const std::map<std::string, std::pair<int64_t, int64_t>>& layers) {
  torch::manual_seed(3);
  NamedTensors matrices;
  for (const auto& [name, sizes] : layers) {
    matrices.emplace(kLayer + name + ".lora_A", torch::randn({sizes.first, 16}));
    matrices.emplace(kLayer + name + ".lora_B", torch::randn({sizes.second, sizes.first}));
  }
  return matrices;
}

Tensor change_of(const NamedTensors& matrices, const std::string& name, double scale) {
  return scale * matrices.at(kLayer + name + ".lora_B")
                     .to(torch::kDouble)
                     .mm(matrices.at(kLayer + name + ".lora_A").to(torch::kDouble));
}

}  // namespace

TEST_CASE(
    "the adapter of a CausalLm has the names and shapes of transformers' layers in a folder, and comes back",
    "[causal_lm][lora][adapter_files]") {
  for (const bool quantized : {false, true}) {
    const TemporaryFolder folder;
    CausalLm model = base_model(), again = base_model();
    for (CausalLm* each : {&model, &again}) {
      if (quantized) modules::quantize(**each, modules::Nf4Options().targets({"layers.**"}));
    }
    modules::add_lora(*model, some_adapters());
    randomize(model);
    save_adapter(*model, folder.path("a"));

    const NamedTensors tensors = tensors_in(folder.path("a") + "/adapter_model.safetensors");
    CHECK(tensors.size() == 2 * 2 * 7);
    const auto of = [&](const std::string& name, const std::string& matrix) {
      return tensors.at(kPrefix + kLayer + name + ".lora_" + matrix + ".weight");
    };
    const modules::LoraAdapter qkv = adapter_of(model, "layers.0.qkv.linear"),
                               fc1 = adapter_of(model, "layers.0.mlp.fc1");
    for (const char* name : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}) {
      CHECK(same_bits(of(name, "A"), qkv->A));
    }
    CHECK(same_bits(of("self_attn.q_proj", "B"), qkv->B.narrow(0, 0, 16)));
    CHECK(same_bits(of("self_attn.k_proj", "B"), qkv->B.narrow(0, 16, 8)));
    CHECK(same_bits(of("self_attn.v_proj", "B"), qkv->B.narrow(0, 24, 8)));
    CHECK(same_bits(of("self_attn.o_proj", "B"), adapter_of(model, "layers.0.projection")->B));
    CHECK(same_bits(of("mlp.gate_proj", "B"), fc1->B.narrow(0, 0, 24)));
    CHECK(same_bits(of("mlp.up_proj", "B"), fc1->B.narrow(0, 24, 24)));
    CHECK(same_bits(of("mlp.down_proj", "A"), adapter_of(model, "layers.0.mlp.fc2")->A));
    const json config = config_in(folder.path("a"));
    CHECK(config.at("r") == 3);
    CHECK(config.at("lora_alpha") == 6);
    CHECK(config.at("target_modules").size() == 2 * 7);
    CHECK(config.at("target_modules").at(0) == kLayer + "mlp.down_proj");

    const auto names = load_adapter(*again, folder.path("a"));
    CHECK(names.size() == 2 * 4);
    CHECK(names.front() == "layers.0.mlp.fc1");
    CHECK(modules::trainable(*again).keys() == modules::trainable(*model).keys());
    CHECK(adapter_of(again, "layers.0.qkv.linear")->r() == 3);
    CHECK(again(some_ids()).equal(model(some_ids())));
    load_adapter(*again, folder.path("a"));  // into the one that is there
    CHECK(again(some_ids()).equal(model(some_ids())));

    save_weights(*model, folder.path("all.safetensors"));
    CausalLm other = base_model(false, 2);
    load_weights(*other, folder.path("all.safetensors"));
    CHECK(other->layers[0]->as<modules::TransformerLayerImpl>()->projection->nf4().is_empty() == !quantized);
    load_adapter(*other, folder.path("a"));
    CHECK(other(some_ids()).equal(model(some_ids())));
  }
}

TEST_CASE("adapters of queries and values alone, and of gates, are joined into those of their layers",
          "[causal_lm][lora][adapter_files]") {
  for (const bool rslora : {false, true}) {
    CAPTURE(rslora);
    const TemporaryFolder folder;
    const NamedTensors matrices = matrices_of(
        {{"self_attn.q_proj", {2, 16}}, {"self_attn.v_proj", {2, 8}}, {"mlp.gate_proj", {4, 24}}});
    const double alpha = 3;
    json config = {
        {"r", 2}, {"lora_alpha", alpha}, {"use_rslora", rslora}, {"rank_pattern", {{"gate_proj", 4}}}};
    put_folder(folder.path("a"), matrices, config);
    CausalLm model = base_model();
    CHECK(load_adapter(*model, folder.path("a")) == Names{"layers.0.mlp.fc1", "layers.0.qkv.linear"});
    CHECK(adapter_of(model, "layers.0.qkv.linear")->r() == 4);  // two of two
    CHECK(adapter_of(model, "layers.0.mlp.fc1")->r() == 4);

    const auto scale = [&](double r) { return alpha / (rslora ? std::sqrt(r) : r); };
    const CausalLm plain = base_model();
    const auto weight_of = [](const CausalLm& lm, const std::string& name) {
      return lm->named_parameters()[name].detach();
    };
    const Tensor qkv_before = weight_of(plain, "layers.0.qkv.linear.weight").to(torch::kDouble);
    const Tensor fc1_before = weight_of(plain, "layers.0.mlp.fc1.weight").to(torch::kDouble);
    const Tensor adapted = model(some_ids());
    modules::merge(*model);
    const Tensor qkv = weight_of(model, "layers.0.qkv.linear.weight").to(torch::kDouble) - qkv_before;
    const Tensor fc1 = weight_of(model, "layers.0.mlp.fc1.weight").to(torch::kDouble) - fc1_before;
    const auto close = [](const Tensor& a, const Tensor& b) {
      return a.allclose(b, 1e-5, 1e-5);
    };  // weights are fp32
    CHECK(close(qkv.narrow(0, 0, 16), change_of(matrices, "self_attn.q_proj", scale(2))));
    CHECK(qkv.narrow(0, 16, 8).abs().max().item<double>() == 0);
    CHECK(close(qkv.narrow(0, 24, 8), change_of(matrices, "self_attn.v_proj", scale(2))));
    CHECK(close(fc1.narrow(0, 0, 24), change_of(matrices, "mlp.gate_proj", scale(4))));
    CHECK(fc1.narrow(0, 24, 24).abs().max().item<double>() == 0);
    CHECK(model(some_ids()).allclose(adapted, 1e-3, 1e-4));
    modules::unmerge(*model);

    save_adapter(*model, folder.path("b"));  // with the joined matrix A for each of them
    CausalLm again = base_model();
    load_adapter(*again, folder.path("b"));
    CHECK(again(some_ids()).equal(adapted));
    CHECK(adapter_of(again, "layers.0.qkv.linear")->r() == 4);
    load_adapter(*model, folder.path("a"));  // it fits what it has made
    CHECK(model(some_ids()).equal(adapted));
  }
}

TEST_CASE("a folder with a CausalLm's adapter by pacer's names is read, too",
          "[causal_lm][lora][adapter_files]") {
  const TemporaryFolder folder;
  CausalLm model = base_model(), again = base_model();
  modules::add_lora(*model, some_adapters());
  randomize(model);
  NamedTensors matrices;
  for (const auto& layer : {"layers.0.qkv.linear", "layers.1.mlp.fc2"}) {
    matrices.emplace(std::string(layer) + ".lora_A", adapter_of(model, layer)->A);
    matrices.emplace(std::string(layer) + ".lora_B", adapter_of(model, layer)->B);
  }
  put_folder(folder.path("a"), matrices, {{"r", 3}, {"lora_alpha", 6}});
  CHECK(load_adapter(*again, folder.path("a")) == Names{"layers.0.qkv.linear", "layers.1.mlp.fc2"});
  for (const auto& layer : {"layers.0.qkv.linear", "layers.1.mlp.fc2"}) {
    CHECK(same_bits(adapter_of(again, layer)->A, adapter_of(model, layer)->A));
    CHECK(same_bits(adapter_of(again, layer)->B, adapter_of(model, layer)->B));
  }
}

TEST_CASE("modules that are trained beside the adapter of a CausalLm have transformers' names, too",
          "[causal_lm][lora][adapter_files]") {
  const TemporaryFolder folder;
  CausalLm model = base_model(), again = base_model();
  modules::add_lora(*model, some_adapters());
  randomize(model);
  const auto trained = [](CausalLm& lm) {
    return std::vector<Tensor>{lm->embedding->weight, lm->head->weight, lm->norm->weight,
                               lm->named_parameters()["layers.1.mlp.norm.weight"]};
  };
  {
    const torch::NoGradGuard no_grad;
    for (Tensor tensor : trained(model)) tensor.requires_grad_(true).add_(0.5);
  }
  save_adapter(*model, folder.path("a"));
  CHECK(config_in(folder.path("a")).at("modules_to_save") ==
        json({"lm_head", "model.embed_tokens", "model.layers.1.post_attention_layernorm", "model.norm"}));
  CHECK(tensors_in(folder.path("a") + "/adapter_model.safetensors").count(kPrefix + "model.norm.weight") ==
        1);
  load_adapter(*again, folder.path("a"));
  CHECK(again(some_ids()).equal(model(some_ids())));
  for (const Tensor& tensor : trained(again)) CHECK(tensor.requires_grad());

  CausalLm tied = base_model(true);
  modules::add_lora(*tied, some_adapters());
  tied->embedding->weight.requires_grad_(true);
  CHECK_THAT(message_of([&] { save_adapter(*tied, folder.path("tied")); }),
             ContainsSubstring("\"embedding\" is trained beside the adapter and is the head, too"));
}

TEST_CASE("adapters that cannot be a CausalLm's are refused, and change nothing",
          "[causal_lm][lora][adapter_files][errors]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("a");
  const auto refused = [&](const NamedTensors& matrices, const json& config, const Names& parts) {
    put_folder(path, matrices, config);
    CausalLm fresh = base_model(), adapted = base_model();
    modules::add_lora(*adapted, some_adapters());
    for (CausalLm* model : {&fresh, &adapted})
      check_load_fails(**model, parts, [&] { load_adapter(**model, path); });
  };
  const json config = {{"r", 2}, {"lora_alpha", 4}};
  const NamedTensors sound = matrices_of({{"self_attn.q_proj", {2, 16}}, {"self_attn.k_proj", {2, 8}}});
  refused(
      sound, {{"r", 2}, {"lora_alpha", 4}, {"alpha_pattern", {{"k_proj", 5}}}},
      {"\"model.layers.0.self_attn.q_proj\" and \"model.layers.0.self_attn.k_proj\" are scaled differently",
       "\"layers.0.qkv.linear\""});
  refused(sound, {{"r", 3}, {"lora_alpha", 4}},
          {"[2, 16] and [16, 2]", "where r is 3, the layer has 16 rows in \"layers.0.qkv.linear\""});
  refused(matrices_of({{"self_attn.q_proj", {2, 16}}, {"self_attn.k_proj", {2, 16}}}), config,
          {"model.layers.0.self_attn.k_proj", "the layer has 8 rows in \"layers.0.qkv.linear\""});
  NamedTensors changed = sound;
  changed[kLayer + "self_attn.k_proj.lora_A"] = torch::ones({2, 12});
  refused(changed, config, {"model.layers.0.self_attn.k_proj", "have as many columns"});
  changed = sound;
  for (auto& item : changed) {
    if (item.first.back() == 'A') item.second = torch::ones({2, 12});
  }
  refused(changed, config, {"layers.0.qkv.linear", "[2, 12]"});
  changed = sound;
  changed.erase(kLayer + "self_attn.k_proj.lora_B");
  refused(changed, config, {"only one of the two matrices of \"model.layers.0.self_attn.k_proj\""});
  changed = sound;
  changed["layers.0.qkv.linear.lora_A"] = torch::ones({2, 16});
  changed["layers.0.qkv.linear.lora_B"] = torch::ones({32, 2});
  refused(changed, config,
          {"\"layers.0.qkv.linear\" and of \"model.layers.0.self_attn.q_proj\", which are one layer"});
  changed = sound;
  changed["model.layers.2.self_attn.q_proj.lora_A"] = torch::ones({2, 16});
  changed["model.layers.2.self_attn.q_proj.lora_B"] = torch::ones({16, 2});
  refused(changed, config, {"\"model.layers.2.self_attn.q_proj\", which is no layer of this CausalLm"});
  changed = sound;
  changed["lm_head.lora_A"] = torch::ones({2, 16});
  changed["lm_head.lora_B"] = torch::ones({40, 2});
  refused(changed, config, {"\"head\", which is no pacer::modules::Linear of the model"});
}

}  // namespace pacer::testing::causal_lm_adapter_folders
