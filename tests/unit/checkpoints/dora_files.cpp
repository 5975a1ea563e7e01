// Adapters with DoRA in PEFT's files: names and shapes, reading back, and what is refused.
#include <cmath>

#include <nlohmann/json.hpp>

#include <pacer/checkpoints/adapter_files.h>
#include <pacer/modules/causal_lm.h>

#include "support/catch.h"
#include "support/checkpoints/adapter_samples.h"
#include "support/checkpoints/failed_loads.h"

namespace pacer::testing::dora_files {
namespace {

using modules::CausalLm;
using modules::LoraOptions;
using nlohmann::json;

LoraOptions some_dora() {
  return LoraOptions(3).alpha(6).dropout(0.25).dora(true).targets({"block.up", "block.down"});
}

CausalLm base_lm() {
  torch::manual_seed(1);
  return CausalLm(modules::CausalLmOptions(40, 16, 2, 4).ffn(24).kv_heads(2).init_std(0.2));
}

Tensor some_ids() { return torch::arange(24).view({2, 12}); }

const std::string kUp = "base_model.model.block.up.lora_magnitude_vector";

}  // namespace

TEST_CASE("an adapter with DoRA has PEFT's names in its files and is read back", "[lora][adapter_files]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("a");
  FileNet model = adapted(some_dora());
  save_adapter(*model, path);
  CHECK(config_in(path).at("use_dora") == true);
  const NamedTensors in_file = tensors_in(path + "/adapter_model.safetensors");
  CHECK(in_file.size() == 6);
  CHECK(in_file.at(kUp).sizes() == at::IntArrayRef({96}));
  CHECK(same_bits(in_file.at(kUp), model->block->up->adapter("default")->magnitude));
  FileNet other;
  CHECK(load_adapter(*other, path) == Names{"block.down", "block.up"});
  CHECK(modules::trainable(*other).size() == 6);
  FileNet frozen;
  load_adapter(*frozen, path, LoadAdapterOptions().trainable(false));
  for (const auto& item : frozen->named_parameters()) CHECK_FALSE(item.value().requires_grad());
  {
    const torch::NoGradGuard no_grad;
    for (const auto& item : modules::trainable(*other)) item.value().zero_();
  }
  load_adapter(*other, path);  // into the one that is there
  for (const auto& [name, tensor] : detail::model_tensors(*other)) {
    CAPTURE(name);
    if (name.find("lora_") != std::string::npos)
      CHECK(same_bits(tensor, detail::model_tensors(*model).at(name)));
  }
  FileNet plain = adapted(some_options());
  save_adapter(*plain, folder.path("b"));
  CHECK(config_in(folder.path("b")).at("use_dora") == false);
}

TEST_CASE("files of DoRA that do not fit are refused by name", "[lora][adapter_files]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("a"), file = path + "/adapter_model.safetensors";
  FileNet model = adapted(some_dora()), fresh, plain = adapted(some_dora().dora(false));
  save_adapter(*model, path);
  const NamedTensors sound = tensors_in(file);
  const json config = config_in(path);
  const auto check = [&](FileNet& target, const Names& parts) {
    check_load_fails(*target, parts, [&] { load_adapter(*target, path); });
  };
  check(plain, {"is of DoRA, but the adapter \"default\" of \"block.", "in the model is not"});
  NamedTensors tensors = sound;
  tensors[kUp] = torch::ones({95});
  put_tensors_in(file, tensors);
  check(fresh, {"lora_magnitude_vector of [95] for \"block.up\"", "96 rows"});
  tensors[kUp] = torch::full({96}, std::nan(""));
  put_tensors_in(file, tensors);
  check(fresh, {"lora_magnitude_vector", "not finite"});
  tensors.erase(kUp);
  put_tensors_in(file, tensors);
  check(fresh, {"no lora_magnitude_vector of \"block.up\""});
  check(model, {"no lora_magnitude_vector of \"block.up\""});
  put_tensors_in(file, sound);
  json without = config;
  without["use_dora"] = false;
  put_content(path + "/adapter_config.json", without.dump());
  check(fresh, {"lora_magnitude_vector", "no matrix of a low-rank adapter"});
  without["use_dora"] = "yes";
  put_content(path + "/adapter_config.json", without.dump());
  check(fresh, {path});
}

TEST_CASE("DoRA of a CausalLm has transformers' layers in the files, and comes back",
          "[causal_lm][lora][adapter_files]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("a"), file = path + "/adapter_model.safetensors";
  CausalLm model = base_lm(), again = base_lm();
  modules::add_lora(*model, LoraOptions(3).alpha(6).dora(true).targets({"layers.**"}));
  {
    torch::manual_seed(7);
    const torch::NoGradGuard no_grad;
    for (const auto& item : modules::trainable(*model))
      item.value().mul_(torch::rand_like(item.value()) + 0.5);
  }
  save_adapter(*model, path);
  NamedTensors in_file = tensors_in(file);
  const std::string layer = "base_model.model.model.layers.0.";
  const auto rows = [&](const char* name) {
    return in_file.at(layer + name + ".lora_magnitude_vector").sizes().vec();
  };
  CHECK(rows("self_attn.q_proj") == std::vector<int64_t>{16});
  CHECK(rows("self_attn.k_proj") == std::vector<int64_t>{8});
  CHECK(rows("mlp.gate_proj") == std::vector<int64_t>{24});
  CHECK(rows("mlp.down_proj") == std::vector<int64_t>{16});
  load_adapter(*again, path);
  CHECK(same_bits(again->forward(some_ids()), model->forward(some_ids())));
  for (const char* suffix : {".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"}) {
    in_file.erase(layer + "self_attn.k_proj" + suffix);
  }
  put_tensors_in(file, in_file);
  CausalLm fresh = base_lm();
  check_load_fails(*fresh, {"lora_magnitude_vector of exactly all rows of \"layers.0.qkv.linear\""},
                   [&] { load_adapter(*fresh, path); });
}

}  // namespace pacer::testing::dora_files
