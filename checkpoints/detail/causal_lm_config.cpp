#include <pacer/checkpoints/detail/causal_lm_config.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <pacer/checkpoints/detail/config_text.h>
#include <pacer/core/error.h>
#include <pacer/files/json_writer.h>
#include <pacer/files/number_text.h>

namespace pacer::detail {
namespace {

// What makes such a folder and which ids mean what; how far positions were trained; notes for other programs, as the
// folders of SmolLM2 have them; and windows, which use_sliding_window alone puts in force.
constexpr std::string_view kPassedOver[] = {"architectures",
                                            "bos_token_id",
                                            "eos_token_id",
                                            "pad_token_id",
                                            "dtype",
                                            "torch_dtype",
                                            "_name_or_path",
                                            "transformers_version",
                                            "_attn_implementation_autoset",
                                            "is_llama_config",
                                            "transformers.js_config",
                                            "use_cache",
                                            "pretraining_tp",
                                            "max_position_embeddings",
                                            "sliding_window",
                                            "max_window_layers"};

// What the best-known of the others stand for.
struct Unsupported {
  std::string_view field, meaning;
};
constexpr Unsupported kUnsupported[] = {
    {"attention_bias", "a bias behind attention"},
    {"attention_dropout", "dropout of attention weights"},
    {"mlp_bias", "biases of the network"},
    {"partial_rotary_factor", "rotary positions of some channels"},
    {"quantization_config", "weights in few bits"},
    {"use_sliding_window", "attention in a sliding window"},
};

// The numbers of scaled positions by their names in the file, the length aside.
struct ScalingNumber {
  std::string_view field;
  double RopeScaling::*member;
};
constexpr ScalingNumber kScalingNumbers[] = {{"factor", &RopeScaling::factor},
                                             {"low_freq_factor", &RopeScaling::low_freq_factor},
                                             {"high_freq_factor", &RopeScaling::high_freq_factor}};
constexpr std::string_view kOriginalLength = "original_max_position_embeddings";

struct Architecture {
  std::string_view model_type, class_name;
};
constexpr Architecture kArchitectures[] = {
    {"llama", "LlamaForCausalLM"}, {"qwen2", "Qwen2ForCausalLM"}, {"qwen3", "Qwen3ForCausalLM"}};

// The sizes by their names in the file.
struct Size {
  std::string_view field;
  int64_t CausalLmConfig::*member;
};
constexpr Size kSizes[] = {
    {"vocab_size", &CausalLmConfig::vocabulary},     {"hidden_size", &CausalLmConfig::hidden},
    {"intermediate_size", &CausalLmConfig::ffn},     {"num_hidden_layers", &CausalLmConfig::layers},
    {"num_attention_heads", &CausalLmConfig::heads}, {"num_key_value_heads", &CausalLmConfig::kv_heads},
    {"head_dim", &CausalLmConfig::head_dim}};
constexpr size_t kRequiredSizes = 5;  // the first of them
constexpr int64_t kLargestSize = int64_t{1} << 40;

// What transformers' Qwen2 and Qwen3 have where a file does not say it.
constexpr int64_t kQwenKvHeads = 32, kQwen3HeadDim = 128;

class Parser {
 public:
  explicit Parser(const std::string& path) : path_(path) {}

  CausalLmConfig parse(std::string text) {
    const auto seen = read_config_fields(
        text, path_,
        [&](JsonScanner& scanner, std::string_view name, size_t at) { read(scanner, name, at); });
    require<FileError>(seen.count("model_type") > 0, path_,
                       " has no model_type; it is not a config.json of transformers");
    for (size_t i = 0; i < kRequiredSizes; ++i) {
      require<FileError>(seen.count(kSizes[i].field) > 0, path_, " has no ", kSizes[i].field);
    }
    const bool is_llama = config_.model_type == "llama";
    if (config_.kv_heads == 0) {
      config_.kv_heads = is_llama || seen.count("num_key_value_heads") > 0 ? config_.heads : kQwenKvHeads;
    }
    if (config_.head_dim == 0) {
      config_.head_dim = config_.model_type == "qwen3" ? kQwen3HeadDim : config_.hidden / config_.heads;
    }
    require(!theta_ || !nested_theta_ || *theta_ == *nested_theta_, path_, " has two different rope_theta, ",
            theta_.value_or(0), " and ", nested_theta_.value_or(0));
    config_.theta = nested_theta_.value_or(theta_.value_or(config_.theta));
    require(ropes_.size() < 2 || ropes_[0] == ropes_[1], path_,
            " has two different kinds of rotary positions, in rope_scaling and rope_parameters");
    if (!ropes_.empty()) config_.scaling = ropes_.front();
    return config_;
  }

 private:
  void read(JsonScanner& scanner, std::string_view name, size_t at) {
    const auto has = [&](std::string_view text) { return name == text; };
    for (const Size& size : kSizes) {
      if (!has(size.field)) continue;
      if (&size >= kSizes + kRequiredSizes && scanner.take_null()) return;
      config_.*size.member = scanner.integer();
      if (config_.*size.member < 1) scanner.fail_at(at, name, " is 0; it is at least 1");
      if (config_.*size.member > kLargestSize) scanner.fail_at(at, name, " is too large");
      return;
    }
    if (has("model_type")) return read_model_type(scanner);
    if (has("hidden_act")) {
      const std::string activation(scanner.string());
      require(activation == "silu", path_, " has hidden_act ", quote_for_message(activation),
              "; CausalLm knows \"silu\" alone");
    } else if (has("rms_norm_eps")) {
      config_.eps = above_zero(scanner, name, at);
    } else if (has("initializer_range")) {
      config_.init_std = scanner.number();
      if (!(config_.init_std >= 0)) scanner.fail_at(at, "initializer_range is below 0");
    } else if (has("tie_word_embeddings")) {
      config_.tied = scanner.boolean();
    } else if (has("rope_theta")) {
      theta_ = above_zero(scanner, name, at);
    } else if (has("rope_parameters") || has("rope_scaling")) {
      read_rope(scanner, std::string(name));
    } else if (has("is_causal")) {
      require(scanner.boolean(), path_,
              " has is_causal false: attention in both directions, which CausalLm does not have");
    } else if (has("partial_rotary_factor")) {
      if (scanner.peek() == 'n') return scanner.skip_value();
      if (scanner.number() != 1) refuse(name);
    } else if (has("layer_types")) {
      read_layer_types(scanner);
    } else if (std::find(std::begin(kPassedOver), std::end(kPassedOver), name) != std::end(kPassedOver)) {
      scanner.skip_value();
    } else if (!skip_if_off(scanner)) {
      refuse(name);
    }
  }

  void read_model_type(JsonScanner& scanner) {
    config_.model_type = scanner.string();
    const auto is_it = [&](const Architecture& each) { return each.model_type == config_.model_type; };
    require(std::any_of(std::begin(kArchitectures), std::end(kArchitectures), is_it), path_,
            " is of the model_type ", quote_for_message(config_.model_type),
            "; CausalLm is a llama, qwen2 or qwen3");
  }

  // Positions that are not scaled or as Llama 3.1's are, in either version's words.
  void read_rope(JsonScanner& scanner, const std::string& field) {
    if (scanner.take_null()) return;
    std::string type, first_number;
    RopeScaling scaling;
    read_fields(scanner, [&](JsonScanner&, std::string_view name, size_t at) {
      if (name == "rope_theta") {
        const double theta = above_zero(scanner, name, at);
        require(nested_theta_.value_or(theta) == theta, path_, " has two different rope_theta, ",
                nested_theta_.value_or(0), " and ", theta);
        nested_theta_ = theta;
      } else if (name == "rope_type" || name == "type") {
        const std::string said(scanner.string());
        require(type.empty() || type == said, path_, " has ", field, " of two types, ",
                quote_for_message(type), " and ", quote_for_message(said));
        type = said;
      } else if (read_scaling(scanner, name, at, scaling)) {
        if (first_number.empty()) first_number = name;
      } else if (name == "partial_rotary_factor" && scanner.peek() != 'n') {
        if (scanner.number() != 1) refuse(concatenate(field, '.', name));
      } else if (!skip_if_off(scanner)) {
        refuse(concatenate(field, '.', name));
      }
    });
    require(type.empty() || type == "default" || type == "llama3", path_, " has ", field, " of the type ",
            quote_for_message(type), R"(; CausalLm knows "default" and "llama3")");
    if (type == "llama3") return add_scaling(scaling, field);
    if (!first_number.empty()) refuse(concatenate(field, '.', first_number));
    ropes_.push_back(std::nullopt);
  }

  // Returns whether this field is a number of scaled positions, and was read.
  static bool read_scaling(JsonScanner& scanner, std::string_view name, size_t at, RopeScaling& scaling) {
    for (const ScalingNumber& number : kScalingNumbers) {
      if (name != number.field) continue;
      scaling.*number.member = above_zero(scanner, name, at);
      return true;
    }
    if (name != kOriginalLength) return false;
    scaling.original_length = scanner.integer();
    return true;
  }

  void add_scaling(const RopeScaling& scaling, const std::string& field) {
    for (const ScalingNumber& number : kScalingNumbers) {
      require<FileError>(scaling.*number.member > 0, path_, " has no ", field, ".", number.field);
    }
    require<FileError>(scaling.original_length > 0, path_, " has no ", field, ".", kOriginalLength,
                       " above 0");
    require(scaling.factor >= 1 && scaling.high_freq_factor > scaling.low_freq_factor, path_, " has ", field,
            " with a factor below 1, or a high_freq_factor that is not above low_freq_factor");
    ropes_.push_back(scaling);
  }

  void read_layer_types(JsonScanner& scanner) {
    if (scanner.take_null()) return;
    scanner.expect('[');
    if (scanner.take(']')) return;
    do {
      const std::string type(scanner.string());
      require(type == "full_attention", path_, " has layer_types with ", quote_for_message(type),
              "; CausalLm knows \"full_attention\" alone");
    } while (scanner.more(']'));
  }

  static double above_zero(JsonScanner& scanner, std::string_view name, size_t at) {
    const double value = scanner.number();
    if (!(value > 0)) scanner.fail_at(at, name, " is ", value, ", not above 0");
    return value;
  }

  [[noreturn]] void refuse(std::string_view name) const {
    std::string_view meaning;
    for (const Unsupported& feature : kUnsupported) {
      if (feature.field == name) meaning = feature.meaning;
    }
    if (name.substr(0, 5) == "rope_") meaning = "rotary positions scaled in another way";
    throw InvalidArgument(concatenate(path_, " uses ", quote_for_message(name), meaning.empty() ? "" : ", ",
                                      meaning, ", which CausalLm does not have"));
  }

  const std::string& path_;
  CausalLmConfig config_;
  std::optional<double> theta_, nested_theta_;
  std::vector<std::optional<RopeScaling>> ropes_;  // what rope_scaling and rope_parameters say
};

void add_rope(JsonWriter& json, std::string_view field, const CausalLmConfig& config) {
  json.key(field).object(JsonLayout::lines);
  if (config.scaling) {
    for (const ScalingNumber& number : kScalingNumbers) {
      json.add(number.field, (*config.scaling).*number.member);
    }
    json.add(kOriginalLength, config.scaling->original_length);
  }
  json.add("rope_theta", config.theta).add("rope_type", config.scaling ? "llama3" : "default").end();
}

std::string text_of(const std::optional<RopeScaling>& scaling) {
  if (!scaling) return "none";
  std::string text = "llama3";
  for (const ScalingNumber& number : kScalingNumbers) {
    text += concatenate(", ", number.field, " ", exact_text((*scaling).*number.member));
  }
  return concatenate(text, ", ", kOriginalLength, " ", scaling->original_length);
}

}  // namespace

std::string causal_lm_config_text(const CausalLmConfig& config, const CausalLmNotes& notes) {
  JsonWriter json;
  json.object(JsonLayout::lines);
  json.key("architectures").list(JsonLayout::lines);
  for (const Architecture& each : kArchitectures) {
    if (each.model_type == config.model_type) json.value(each.class_name);
  }
  json.end();
  if (config.model_type != "qwen2") json.add("attention_bias", false);  // whose biases are no option
  json.add("attention_dropout", 0.0);
  json.add("bos_token_id", nullptr).add("dtype", notes.dtype).add("eos_token_id", nullptr);
  json.add("hidden_act", "silu");
  for (const Size& size : kSizes) json.add(size.field, config.*size.member);
  json.key("initializer_range").real(config.init_std).add("max_position_embeddings", notes.max_positions);
  json.add("model_type", config.model_type).add("pad_token_id", nullptr).key("rms_norm_eps").real(config.eps);
  add_rope(json, "rope_parameters", config);
  if (config.scaling) add_rope(json, "rope_scaling", config);  // transformers 4
  json.add("rope_theta", config.theta).add("tie_word_embeddings", config.tied);
  return json.add("torch_dtype", notes.dtype).add("use_cache", true).end().text() + '\n';
}

CausalLmConfig parse_causal_lm_config(std::string text, const std::string& path) {
  return Parser(path).parse(std::move(text));
}

std::string difference(const CausalLmConfig& there, const CausalLmConfig& model) {
  const auto sentence = [](std::string_view field, const auto& a, const auto& b) {
    return concatenate(field, " ", a, " there, but ", b, " in the model");
  };
  if (there.model_type != model.model_type) {
    return sentence("model_type", there.model_type, model.model_type.empty() ? "none" : model.model_type);
  }
  for (const Size& size : kSizes) {
    const int64_t a = there.*size.member, b = model.*size.member;
    if (a != b) return sentence(size.field, a, b);
  }
  if (there.eps != model.eps) return sentence("rms_norm_eps", exact_text(there.eps), exact_text(model.eps));
  if (there.theta != model.theta)
    return sentence("rope_theta", exact_text(there.theta), exact_text(model.theta));
  if (!(there.scaling == model.scaling))
    return sentence("rope_scaling", text_of(there.scaling), text_of(model.scaling));
  if (there.tied == model.tied) return "";
  return sentence("tie_word_embeddings", there.tied ? "true" : "false", model.tied ? "true" : "false");
}

}  // namespace pacer::detail
