// Folders of Hugging Face with a CausalLm: where rows go, what is refused, and that a refusal changes nothing. That what
// they mean is what transformers means is in tests/examples/causal_lm_files.py.
#include <filesystem>
#include <fstream>
#include <functional>

#include <nlohmann/json.hpp>

#include <pacer/checkpoints/causal_lm_files.h>
#include <pacer/checkpoints/checkpoints.h>
#include <pacer/checkpoints/save_weights.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/session/session.h>

#include "support/catch.h"
#include "support/checkpoints/weight_files.h"
#include "support/message_of.h"

namespace pacer::testing::causal_lm_files {
namespace {

using Catch::Matchers::ContainsSubstring;
using modules::CausalLm;
using modules::CausalLmOptions;
using nlohmann::json;

CausalLmOptions small(bool has_bias = false, bool has_norms = false) {
  CausalLmOptions options(40, 16, 2, 4);
  options.ffn(24).kv_heads(2).head_dim(6).theta(500).eps(1e-6).qk_norm(has_norms);
  if (has_bias) options.qkv_bias(true);
  return options;
}

CausalLm random_model(const CausalLmOptions& options, uint64_t seed = 1) {
  torch::manual_seed(seed);
  CausalLm model(options);
  const torch::NoGradGuard no_grad;
  for (Tensor& parameter : model->parameters()) parameter.normal_();
  return model;
}

json config_in(const std::string& folder) { return json::parse(content_of(folder + "/config.json")); }

void put_config(const std::string& folder, const json& config) {
  put_content(folder + "/config.json", config.dump());
}

std::string refusal(CausalLm& model, const std::string& folder) {
  const ModelState before = state_of_model(*model);
  const std::string said = message_of([&] { load_causal_lm(*model, folder); });
  CHECK(changed_since(*model, before) == "");
  CHECK(said.find(folder) != std::string::npos);
  return said;
}

json llama3(const json& more = json::object()) {
  json scaling = {{"rope_type", "llama3"},
                  {"factor", 8.0},
                  {"low_freq_factor", 1.0},
                  {"high_freq_factor", 4.0},
                  {"original_max_position_embeddings", 64}};
  scaling.update(more);
  return scaling;
}

}  // namespace

TEST_CASE("rows of a CausalLm have the names that transformers gives them", "[causal_lm][save_weights]") {
  const TemporaryFolder folder;
  CausalLm model = random_model(small(/*has_bias=*/true));
  save_causal_lm(*model, folder.path("new/one"));
  const NamedTensors found = tensors_in(folder.path("new/one/model.safetensors"));
  const auto& layer = *model->layers[1]->as<modules::TransformerLayerImpl>();
  const std::string name = "model.layers.1.";
  const auto same = [&](const std::string& there, const Tensor& rows) {
    CAPTURE(there);
    REQUIRE(found.count(there) == 1);
    CHECK(same_bits(found.at(there), rows.contiguous()));
  };
  for (const auto& [kind, packed] :
       {std::pair("weight", layer.qkv->linear->weight), std::pair("bias", layer.qkv->linear->bias)}) {
    same(name + "self_attn.q_proj." + kind, packed.narrow(0, 0, 24));
    same(name + "self_attn.k_proj." + kind, packed.narrow(0, 24, 12));
    same(name + "self_attn.v_proj." + kind, packed.narrow(0, 36, 12));
  }
  same(name + "self_attn.o_proj.weight", layer.projection->weight);
  same(name + "input_layernorm.weight", layer.qkv->rms_norm->weight);
  same(name + "post_attention_layernorm.weight", layer.mlp->rms_norm->weight);
  same(name + "mlp.gate_proj.weight", layer.mlp->fc1->weight.narrow(0, 0, 24));
  same(name + "mlp.up_proj.weight", layer.mlp->fc1->weight.narrow(0, 24, 24));
  same(name + "mlp.down_proj.weight", layer.mlp->fc2->weight);
  same("model.embed_tokens.weight", model->embedding->weight);
  same("model.norm.weight", model->norm->weight);
  same("lm_head.weight", model->head->weight);
  CHECK(found.size() == 2 * 12 + 3);
  const json config = config_in(folder.path("new/one"));
  CHECK(config["architectures"] == json::array({"Qwen2ForCausalLM"}));
  CHECK(config["rope_parameters"] == json({{"rope_type", "default"}, {"rope_theta", 500}}));
  CHECK(config["rope_theta"] == 500);
  CHECK(config["max_position_embeddings"] == 2048);
  CHECK(config["dtype"] == "float32");
  CHECK_FALSE(std::filesystem::exists(folder.path("new/one/config.json.new")));
}

TEST_CASE("a CausalLm comes back to the bit from the folder that it was saved in",
          "[causal_lm][load_weights]") {
  const TemporaryFolder folder;
  for (const bool tied : {false, true}) {
    for (const bool has_bias : {false, true}) {
      for (const bool has_norms : {false, true}) {
        if (has_bias && has_norms) continue;
        CausalLm model = random_model(small(has_bias, has_norms).tied(tied).init_std(0.1));
        save_causal_lm(*model, folder.path("saved"));
        const CausalLmOptions options = causal_lm_options(folder.path("saved"));
        CHECK(options.init_std() == 0.1);
        CHECK(options.tied() == tied);
        CausalLm again = random_model(options, 2);
        const Tensor weight = again->layers[0]->as<modules::TransformerLayerImpl>()->qkv->linear->weight;
        const LoadedWeights loaded = load_causal_lm(*again, folder.path("saved"));
        CHECK(loaded.missing.empty());
        CHECK(loaded.unexpected.empty());
        CHECK(loaded.loaded.front() == "lm_head.weight");
        for (const auto& item : model->named_parameters()) {
          CAPTURE(item.key());
          CHECK(same_bits(*again->named_parameters().find(item.key()), item.value()));
        }
        CHECK(weight.is_same(again->layers[0]->as<modules::TransformerLayerImpl>()->qkv->linear->weight));
        const Tensor ids = torch::arange(12).view({2, 6});
        CHECK(again(ids).equal(model(ids)));
      }
    }
  }
}

TEST_CASE("a CausalLm takes other dtypes, several files, a tied head's two names and inv_freq",
          "[causal_lm][load_weights]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("hub"), file = path + "/model.safetensors";
  CausalLm model = random_model(small().tied(true));
  model->to(at::kBFloat16);
  save_causal_lm(*model, path, SaveCausalLmOptions().max_positions(7));
  CHECK(config_in(path)["dtype"] == "bfloat16");
  CHECK(config_in(path)["max_position_embeddings"] == 7);
  NamedTensors tensors = tensors_in(file);
  CHECK(tensors.count("lm_head.weight") == 0);
  tensors["lm_head.weight"] = tensors.at("model.embed_tokens.weight").clone();
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch::ones({3});
  std::filesystem::remove(file);
  json index = {{"metadata", json::object()}, {"weight_map", json::object()}};
  NamedTensors halves[2];
  for (const auto& item : tensors) {
    const size_t half = halves[0].size() > halves[1].size() ? 1 : 0;
    halves[half].insert(item);
    index["weight_map"][item.first] = "half-" + std::to_string(half) + ".safetensors";
  }
  for (int half : {0, 1})
    put_tensors_in(path + "/half-" + std::to_string(half) + ".safetensors", halves[half]);
  put_content(path + "/model.safetensors.index.json", index.dump());
  CausalLm again = random_model(causal_lm_options(path), 2);
  const LoadedWeights loaded = load_causal_lm(*again, path);
  CHECK(loaded.unexpected == Names{"model.layers.0.self_attn.rotary_emb.inv_freq"});
  for (const auto& item : model->named_parameters()) {
    CHECK(again->named_parameters().find(item.key())->equal(item.value().to(at::kFloat)));
  }
}

TEST_CASE("weights that are not those of the CausalLm are refused, and nothing is changed",
          "[causal_lm][load_weights][errors]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("hub"), file = path + "/model.safetensors";
  CausalLm model = random_model(small()), other = random_model(small(), 2);
  save_causal_lm(*model, path);
  const NamedTensors tensors = tensors_in(file);
  const auto with = [&](const std::function<void(NamedTensors&)>& change) {
    NamedTensors changed = tensors;
    change(changed);
    put_tensors_in(file, changed);
    return refusal(other, path);
  };
  const std::string name = "model.layers.1.mlp.up_proj.weight";
  CHECK_THAT(with([&](auto& t) { t.erase(name); }), ContainsSubstring("it has no \"" + name + "\""));
  CHECK_THAT(with([&](auto& t) { t["lm_head.bias"] = torch::ones({40}); }),
             ContainsSubstring("the model has no \"lm_head.bias\""));
  CHECK_THAT(
      with([&](auto& t) {
        t[name] = torch::ones({16, 24});
      }),
      ContainsSubstring("\"" + name + "\" is Float of shape [16, 24] there, but Float of shape [24, 16]"));
  CausalLm tied = random_model(small().tied(true));
  save_causal_lm(*tied, path);
  NamedTensors both = tensors_in(file);
  both["lm_head.weight"] = torch::ones({40, 16});
  put_tensors_in(file, both);
  CHECK_THAT(refusal(tied, path), ContainsSubstring("are one tensor in the model, but differ there"));
  CHECK_THROWS_AS(load_causal_lm(*other, folder.path("none")), FileError);
  CHECK_THROWS_WITH(load_causal_lm(*other, ""), ContainsSubstring("needs the name of a folder"));
}

TEST_CASE("a config.json of another model is refused by the field that differs",
          "[causal_lm][load_weights][errors]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("hub");
  CausalLm model = random_model(small());
  save_causal_lm(*model, path);
  const json config = config_in(path);
  const std::vector<std::pair<std::string, json>> others = {{"model_type", "qwen3"},
                                                            {"vocab_size", 41},
                                                            {"hidden_size", 32},
                                                            {"intermediate_size", 48},
                                                            {"head_dim", 4},
                                                            {"num_hidden_layers", 3},
                                                            {"rms_norm_eps", 1e-5},
                                                            {"num_key_value_heads", 4},
                                                            {"rope_theta", 1e4},
                                                            {"num_attention_heads", 2},
                                                            {"tie_word_embeddings", true}};
  for (const auto& [field, value] : others) {
    CAPTURE(field);
    json changed = config;
    changed[field] = value;
    if (field == "rope_theta") changed.erase("rope_parameters");
    put_config(path, changed);
    const std::string said = refusal(model, path);
    CHECK_THAT(said, ContainsSubstring("config.json has " + field + " "));
    CHECK_THAT(said, ContainsSubstring("causal_lm_options(folder)"));
  }
}

TEST_CASE("a config.json says what it leaves out by transformers' defaults", "[causal_lm][load_weights]") {
  const TemporaryFolder folder;
  const json sizes = {{"vocab_size", 40},
                      {"hidden_size", 64},
                      {"intermediate_size", 24},
                      {"num_hidden_layers", 2},
                      {"num_attention_heads", 32}};
  const auto options_of = [&](const char* type, json more = json::object()) {
    more.update(sizes);
    more["model_type"] = type;
    put_config(folder.path("."), more);
    return causal_lm_options(folder.path("."));
  };
  const CausalLmOptions llama =
      options_of("llama", {{"num_key_value_heads", nullptr}, {"head_dim", nullptr}});
  CHECK(llama.kv_heads() == 32);
  CHECK(llama.head_dim() == 2);
  CHECK(llama.theta() == 10000);
  CHECK(llama.eps() == 1e-6);
  CHECK(llama.init_std() == 0.02);
  CHECK_FALSE(llama.tied());
  CHECK_FALSE(llama.qk_norm());
  CHECK_FALSE(llama.qkv_bias().has_value());
  CHECK(options_of("qwen2").qkv_bias() == true);
  CHECK(options_of("qwen3").head_dim() == 128);
  CHECK(options_of("qwen3").qk_norm());
  // What changes nothing, as the published folders have it.
  const json harmless = {
      {"sliding_window", 131072},
      {"max_window_layers", 28},
      {"use_sliding_window", false},
      {"rope_scaling", nullptr},
      {"attention_bias", false},
      {"is_causal", true},
      {"partial_rotary_factor", 1.0},
      {"attention_dropout", 0.0},
      {"eos_token_id", {1, 2}},
      {"torch_dtype", "bfloat16"},
      {"is_llama_config", true},
      {"pretraining_tp", 1},
      {"layer_types", {"full_attention", "full_attention"}},
      {"rope_parameters", {{"type", "default"}, {"rope_theta", 1e6}, {"partial_rotary_factor", 1.0}}}};
  CHECK(options_of("qwen2", harmless).theta() == 1e6);
}

TEST_CASE("positions that are scaled as Llama 3.1's are go to a folder and come back",
          "[causal_lm][load_weights][save_weights]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("hub");
  const auto scaling = modules::RotaryScaling().factor(32).high_frequency_factor(3.5).original_length(64);
  CausalLm model = random_model(CausalLmOptions(small()).scaling(scaling));
  save_causal_lm(*model, path);
  const json config = config_in(path);
  CHECK(config["rope_scaling"] == llama3({{"factor", 32.0}, {"high_freq_factor", 3.5}, {"rope_theta", 500}}));
  CHECK(config["rope_parameters"] == config["rope_scaling"]);
  const auto found = causal_lm_options(path).scaling();
  REQUIRE(found);
  CHECK(found->factor() == 32);
  CHECK(found->low_frequency_factor() == 1);
  CHECK(found->high_frequency_factor() == 3.5);
  CHECK(found->original_length() == 64);
  CausalLm again(causal_lm_options(path));
  (void)load_causal_lm(*again, path);
  const Tensor ids = torch::arange(90).remainder(40).view({1, 90});
  CHECK(same_bits(again(ids), model(ids)));
  CausalLm unscaled = random_model(small());
  CHECK_THAT(refusal(unscaled, path),
             ContainsSubstring("config.json has rope_scaling llama3, factor 32, low_freq_factor 1, "
                               "high_freq_factor 3.5, original_max_position_embeddings 64 there, but "
                               "none in the model"));
  json changed = config;
  changed["rope_scaling"]["factor"] = 8.0;
  put_config(path, changed);
  CHECK_THROWS_WITH(causal_lm_options(path), ContainsSubstring("two different kinds of rotary positions"));
  changed["rope_scaling"] = {{"rope_type", "default"}};
  put_config(path, changed);
  CHECK_THROWS_WITH(causal_lm_options(path), ContainsSubstring("two different kinds of rotary positions"));
  changed = config;
  changed["rope_scaling"]["rope_theta"] = 501;
  changed.erase("rope_theta");
  put_config(path, changed);
  CHECK_THROWS_WITH(causal_lm_options(path), ContainsSubstring("two different rope_theta"));
}

TEST_CASE("a folder is written for those who read it", "[causal_lm][save_weights][errors]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("hub");
  CausalLm model(CausalLmOptions(small()).init_std(0).eps(1));
  save_causal_lm(*model, path);
  const std::string text = content_of(path + "/config.json");
  CHECK_THAT(text, ContainsSubstring("\"initializer_range\": 0.0,"));  // no whole number
  CHECK_THAT(text, ContainsSubstring("\"rms_norm_eps\": 1.0,"));
  CHECK(causal_lm_options(path).eps() == 1);
  CHECK_THROWS_WITH(CausalLm(CausalLmOptions(small()).eps(0)),
                    ContainsSubstring("eps must be a number above 0"));
  CausalLm uneven(CausalLmOptions(40, 20, 1, 3).kv_heads(3).head_dim(8));
  CHECK_THROWS_WITH(save_causal_lm(*uneven, path), ContainsSubstring("is no multiple of its heads, 3"));
  // A run's checkpoints beside it are of pacer's names.
  FusedAdam optimizer(model->named_parameters(), FusedAdamOptions(0.1));
  Session session(*model, optimizer);
  session.use(Checkpoints(CheckpointsOptions(path).every(1)));
  auto [x] = session.begin(torch::zeros({1, 3}, torch::kLong));
  session.backward(model->loss(x, x));
  session.step();
  session.finish();
  (void)load_causal_lm(*model, path);
  std::ofstream(path + "/model.safetensors.index.json") << "{}";
  CHECK_THROWS_WITH(save_causal_lm(*model, path), ContainsSubstring("names the files of other weights"));
  CHECK(content_of(path + "/config.json") == text);
}

TEST_CASE("what a CausalLm cannot do is refused by its name in config.json",
          "[causal_lm][load_weights][errors]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("hub");
  save_causal_lm(*random_model(small()), path);
  const json config = config_in(path);
  const auto put = [&](const std::string& field, const json& value) {
    json changed = config;
    changed[field] = value;
    put_config(path, changed);
  };
  const auto said_of = [&](const std::string& field, const json& value) {
    put(field, value);
    return message_of([&] { causal_lm_options(path); });
  };
  const std::vector<std::pair<std::string, json>> refused = {
      {"model_type", "mistral"},
      {"hidden_act", "gelu"},
      {"attention_bias", true},
      {"mlp_bias", true},
      {"is_causal", false},
      {"partial_rotary_factor", 0},
      {"rope_scaling", {{"rope_type", "default"}, {"type", "llama3"}}},
      {"attention_dropout", 0.1},
      {"use_sliding_window", true},
      {"layer_types", {"full_attention", "sliding_attention"}},
      {"quantization_config", {{"bits", 4}}},
      {"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}},
      {"rope_parameters", {{"rope_type", "yarn"}}},
      {"rope_scaling", llama3({{"factor", 0.5}})},
      {"rope_scaling", llama3({{"high_freq_factor", 1.0}})},
      {"rope_theta", 501},
      {"logit_scale", 0.5}};
  for (const auto& [field, value] : refused) {
    CAPTURE(field, value.dump());
    const std::string said = said_of(field, value);
    CHECK_THAT(said, ContainsSubstring(path + "/config.json"));
    CHECK_THAT(said, ContainsSubstring(field));
    CHECK_THROWS_AS(causal_lm_options(path), InvalidArgument);
  }
  CHECK_THAT(said_of("rope_parameters", {{"partial_rotary_factor", 0.5}}),
             ContainsSubstring("partial_rotary_factor"));
  CHECK_THAT(
      said_of("rope_scaling", {{"factor", 2.0}, {"type", "linear"}}),
      ContainsSubstring(R"(has rope_scaling of the type "linear"; CausalLm knows "default" and "llama3")"));
  CHECK_THAT(said_of("rope_scaling", {{"factor", 2.0}}),
             ContainsSubstring("uses \"rope_scaling.factor\", rotary positions scaled in another way, which "
                               "CausalLm does not have"));
  for (const char* field :
       {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}) {
    json scaling = llama3();
    scaling.erase(field);
    CHECK_THAT(said_of("rope_scaling", scaling),
               ContainsSubstring(std::string("has no rope_scaling.") + field));
    CHECK_THROWS_AS(causal_lm_options(path), FileError);
  }
  CHECK_THAT(said_of("attention_bias", true), ContainsSubstring("a bias behind attention"));
  CHECK_THAT(said_of("head_dim", 0), ContainsSubstring("head_dim is 0"));
  CHECK_THAT(said_of("hidden_size", int64_t{1} << 60), ContainsSubstring("hidden_size is too large"));
  CHECK_THAT(said_of("rms_norm_eps", 0), ContainsSubstring("rms_norm_eps is 0, not above 0"));
  CHECK_THAT(said_of("initializer_range", -1), ContainsSubstring("initializer_range is below 0"));
  for (const char* field : {"model_type", "vocab_size", "hidden_size", "intermediate_size",
                            "num_hidden_layers", "num_attention_heads"}) {
    json changed = config;
    changed.erase(field);
    put_config(path, changed);
    CHECK_THROWS_AS(causal_lm_options(path), FileError);
    CHECK_THROWS_WITH(causal_lm_options(path), ContainsSubstring(std::string("has no ") + field));
  }
  CHECK_THROWS_WITH(causal_lm_options(""), ContainsSubstring("causal_lm_options needs the name of a folder"));
}

TEST_CASE("a CausalLm that transformers has no class for is not saved", "[causal_lm][save_weights][errors]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("hub");
  CausalLm both = random_model(small(true, true)), mixed = random_model(small()),
           wide = random_model(small());
  CHECK_THROWS_WITH(save_causal_lm(*both, path), ContainsSubstring("both qkv_bias and qk_norm"));
  mixed->norm->to(at::kHalf);
  CHECK_THROWS_WITH(save_causal_lm(*mixed, path), ContainsSubstring("model.norm.weight Half"));
  wide->to(at::kDouble);
  CHECK_THROWS_WITH(save_causal_lm(*wide, path), ContainsSubstring("not Double"));
  CHECK_THROWS_WITH(save_causal_lm(*both, ""), ContainsSubstring("needs the name of a folder"));
  CHECK_THROWS_WITH(save_causal_lm(*both, path, SaveCausalLmOptions().max_positions(0)),
                    ContainsSubstring("max_positions must be above 0, not 0"));
  CHECK_FALSE(std::filesystem::exists(path));
}

}  // namespace pacer::testing::causal_lm_files
