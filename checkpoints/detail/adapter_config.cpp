#include <pacer/checkpoints/detail/adapter_config.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string_view>
#include <type_traits>

#include <pacer/checkpoints/detail/config_text.h>
#include <pacer/core/error.h>
#include <pacer/files/json_scanner.h>
#include <pacer/files/json_writer.h>

namespace pacer::detail {
namespace {

// Fields that do not change what the matrices of a file mean: where they come from, which layers they were
// made for, how they started.
constexpr std::string_view kIgnored[] = {
    "auto_mapping",   "base_model_name_or_path", "revision",        "task_type",
    "inference_mode", "target_modules",          "exclude_modules", "layers_pattern",
    "peft_version",   "layers_to_transform",     "runtime_config",  "qalora_group_size",
    "eva_config",     "megatron_core",           "loftq_config",    "init_lora_weights"};

// What the best-known of the others stand for.
struct Feature {
  std::string_view field, meaning;
};
constexpr Feature kFeatures[] = {
    {"bias", "trained biases"},
    {"lora_bias", "biases of adapters"},
    {"fan_in_fan_out", "transposed weights"},
    {"megatron_config", "Megatron's layers"},
    {"layer_replication", "replicated layers"},
    {"trainable_token_indices", "trained tokens"},
    {"target_parameters", "adapters of bare parameters"},
    {"use_qalora", "QALoRA"},
};

// Keys of a pattern, and names of modules. A model of hundreds of layers may have one for each.
constexpr size_t kMostKeys = 10'000;

// Ways to start that change the base model's weights as well.
bool changes_base(std::string_view init) {
  return init != "gaussian" && init != "eva" && init != "orthogonal";
}

// Whether a regular expression takes it for itself.
bool is_plain_character(char c) {
  return ('0' <= c && c <= '9') || ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z') || c == '_' ||
         (static_cast<unsigned char>(c) & 0x80) != 0;
}

// The text that a key of a pattern stands for. PEFT takes it for a regular expression; here it is a name, in
// which a backslash may stand before a character that is no letter.
std::string name_of_key(std::string_view key, std::string_view field, const std::string& path) {
  std::string name;
  bool is_name = !key.empty();
  for (size_t i = 0; i < key.size() && is_name; ++i) {
    const bool is_escaped = key[i] == '\\';
    if (is_escaped) ++i;
    const bool is_plain = i < key.size() && is_plain_character(key[i]);
    is_name = i < key.size() &&
              (is_escaped ? !is_plain || key[i] == '_' : is_plain || key[i] == '.' || key[i] == '-');
    if (is_name) name += key[i];
  }
  require(is_name, path, " has the key ", quote_for_message(key), " in ", quote_for_message(field),
          ", which is more than a name; pacer reads names of layers, or the last parts of them");
  return name;
}

template <class Value, class Read>
AdapterPattern<Value> read_pattern(JsonScanner& scanner, std::string_view field, const std::string& path,
                                   const Read& read) {
  AdapterPattern<Value> pattern;
  if (scanner.take_null()) return pattern;
  scanner.expect('{');
  if (scanner.take('}')) return pattern;
  do {
    const size_t at = scanner.position();
    if (pattern.size() == kMostKeys) scanner.fail_at(at, "more than ", kMostKeys, " keys");
    std::string name = name_of_key(scanner.string(), field, path);
    scanner.expect(':');
    const size_t value_at = scanner.position();
    const Value value = read();
    if (!(value > 0)) scanner.fail_at(value_at, field, " has ", value, ", not a number above 0");
    pattern.emplace_back(std::move(name), value);
  } while (scanner.more('}'));
  return pattern;
}

std::vector<std::string> read_names(JsonScanner& scanner) {
  std::vector<std::string> names;
  if (scanner.take_null()) return names;
  scanner.expect('[');
  if (scanner.take(']')) return names;
  do {
    if (names.size() == kMostKeys) scanner.fail_at(scanner.position(), "more than ", kMostKeys, " names");
    names.emplace_back(scanner.string());
  } while (scanner.more(']'));
  return names;
}

// One field of the object, whose name was read.
void read_config_field(JsonScanner& scanner, std::string_view name, size_t at, AdapterConfig& config,
                       const std::string& path) {
  const auto has = [&](std::string_view text) { return name == text; };
  if (has("peft_type")) {
    const std::string type(scanner.string());
    require(type == "LORA", path, " is of the peft_type ", quote_for_message(type),
            "; pacer knows LORA alone");
  } else if (has("r")) {
    config.r = scanner.integer();
    if (config.r < 1) scanner.fail_at(at, "r is 0; it is at least 1");
  } else if (has("lora_alpha")) {
    config.alpha = scanner.number();
    if (!(config.alpha > 0)) scanner.fail_at(at, "lora_alpha is ", config.alpha, ", not above 0");
  } else if (has("lora_dropout")) {
    config.dropout = scanner.number();
    if (!(config.dropout >= 0 && config.dropout < 1)) {
      scanner.fail_at(at, "lora_dropout is ", config.dropout, ", not in [0, 1)");
    }
  } else if (has("use_rslora")) {
    config.rslora = scanner.boolean();
  } else if (has("use_dora")) {
    config.dora = !scanner.take_null() && scanner.boolean();
  } else if (has("rank_pattern")) {
    config.rank_pattern = read_pattern<int64_t>(scanner, name, path, [&] { return scanner.integer(); });
  } else if (has("alpha_pattern")) {
    config.alpha_pattern = read_pattern<double>(scanner, name, path, [&] { return scanner.number(); });
  } else if (has("modules_to_save")) {
    config.whole_modules = read_names(scanner);
  } else if (has("bias") && scanner.peek() == '"') {
    const std::string bias(scanner.string());
    require(bias == "none", path, " has bias ", quote_for_message(bias),
            ", trained biases, which pacer does not load; save it with bias \"none\"");
  } else if (has("init_lora_weights") && scanner.peek() == '"') {
    const std::string init(scanner.string());
    require(!changes_base(init), path, " has init_lora_weights ", quote_for_message(init),
            ", which changes the base model's weights, too; convert it to a plain LoRA in PEFT first");
  } else if (std::find(std::begin(kIgnored), std::end(kIgnored), name) != std::end(kIgnored)) {
    scanner.skip_value();
  } else if (!skip_if_off(scanner)) {
    std::string_view meaning;
    for (const Feature& feature : kFeatures) {
      if (feature.field == name) meaning = feature.meaning;
    }
    throw InvalidArgument(concatenate(path, " uses ", quote_for_message(name), meaning.empty() ? "" : ", ",
                                      meaning, ", which pacer does not have"));
  }
}

// As a regular expression that matches this text alone.
std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (!is_plain_character(c)) out += '\\';
    out += c;
  }
  return out;
}

// A list, each on a line of its own.
template <class Names>
void add_names(JsonWriter& json, std::string_view key, const Names& names) {
  json.key(key).list(JsonLayout::lines);
  for (const std::string& name : names) json.value(name);
  json.end();
}

// A list of names, or a regular expression.
void add_target_modules(JsonWriter& json, const std::vector<std::string>& layers,
                        const std::vector<std::string>& modules) {
  const std::set<std::string> wanted(layers.begin(), layers.end());
  bool reaches_others = false;
  for (const std::string& module : modules) {
    if (wanted.count(module) > 0) continue;
    for (size_t dot = module.find('.'); dot != std::string::npos; dot = module.find('.', dot + 1)) {
      reaches_others |= wanted.count(module.substr(dot + 1)) > 0;
    }
  }
  if (!reaches_others) return add_names(json, "target_modules", wanted);
  std::string text;
  for (const std::string& name : wanted) text += (text.empty() ? "" : "|") + escaped(name);
  json.add("target_modules", "(?:" + text + ")");
}

// A number, whole ones as whole.
void add_number(JsonWriter& json, std::string_view key, double value) {
  if (value == std::floor(value) && std::fabs(value) < 1e15) {
    json.add(key, static_cast<int64_t>(value));
  } else {
    json.add(key, value);
  }
}

template <class Value>
void add_pattern(JsonWriter& json, std::string_view key, const AdapterPattern<Value>& pattern) {
  json.key(key).object(JsonLayout::lines);
  for (const auto& [name, value] : pattern) {
    if constexpr (std::is_integral_v<Value>) {
      json.add(escaped(name), value);
    } else {
      add_number(json, escaped(name), value);
    }
  }
  json.end();
}

template <class Value>
Value value_of(const AdapterPattern<Value>& pattern, const std::string& layer, Value otherwise) {
  for (const auto& [key, value] : pattern) {
    if (layer.size() < key.size() || layer.compare(layer.size() - key.size(), key.size(), key) != 0) continue;
    if (layer.size() == key.size() || layer[layer.size() - key.size() - 1] == '.') return value;
  }
  return otherwise;
}

}  // namespace

int64_t rank_of(const AdapterConfig& config, const std::string& layer) {
  return value_of(config.rank_pattern, layer, config.r);
}

double alpha_of(const AdapterConfig& config, const std::string& layer) {
  return value_of(config.alpha_pattern, layer, config.alpha);
}

std::string adapter_config_text(const AdapterConfig& config, const std::vector<std::string>& layers,
                                const std::vector<std::string>& modules) {
  JsonWriter json;
  json.object(JsonLayout::lines);
  add_pattern(json, "alpha_pattern", config.alpha_pattern);
  json.add("auto_mapping", nullptr).add("base_model_name_or_path", nullptr).add("bias", "none");
  json.add("fan_in_fan_out", false).add("inference_mode", true).add("init_lora_weights", true);
  json.add("layers_pattern", nullptr).add("layers_to_transform", nullptr);
  add_number(json, "lora_alpha", config.alpha);
  add_number(json, "lora_dropout", config.dropout);
  if (config.whole_modules.empty()) {
    json.add("modules_to_save", nullptr);
  } else {
    add_names(json, "modules_to_save", config.whole_modules);
  }
  json.add("peft_type", "LORA").add("r", config.r);
  add_pattern(json, "rank_pattern", config.rank_pattern);
  json.add("revision", nullptr);
  add_target_modules(json, layers, modules);
  json.add("task_type", nullptr).add("use_dora", config.dora).add("use_rslora", config.rslora);
  return json.end().text() + '\n';
}

AdapterConfig parse_adapter_config(std::string text, const std::string& path) {
  AdapterConfig config;
  const std::set<std::string_view> seen =
      read_config_fields(text, path, [&](JsonScanner& scanner, std::string_view name, size_t at) {
        read_config_field(scanner, name, at, config, path);
      });
  require<FileError>(seen.count("peft_type") > 0, path,
                     " has no peft_type; it is not an adapter_config.json of PEFT");
  return config;
}

}  // namespace pacer::detail
