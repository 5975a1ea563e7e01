// adapter_config.json, the options of an adapter as PEFT keeps them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace pacer::detail {

// What holds for the layers whose names end in a key: the first that fits counts.
template <class Value>
using AdapterPattern = std::vector<std::pair<std::string, Value>>;

struct AdapterConfig {
  int64_t r = 8;
  double alpha = 8;
  double dropout = 0;
  bool rslora = false;
  bool dora = false;
  AdapterPattern<int64_t> rank_pattern;    // in place of r
  AdapterPattern<double> alpha_pattern;    // in place of alpha
  std::vector<std::string> whole_modules;  // modules_to_save: the file has all of their tensors
};

int64_t rank_of(const AdapterConfig& config, const std::string& layer);
double alpha_of(const AdapterConfig& config, const std::string& layer);

// The text for exactly the layers `layers` of a model whose modules are `modules`. PEFT takes a name also for
// the last parts of a longer one; where that would reach other modules, it writes a regular expression
// instead of a list. Keys of patterns are written in the order in which they come.
std::string adapter_config_text(const AdapterConfig& config, const std::vector<std::string>& layers,
                                const std::vector<std::string>& modules);

// Safe for any bytes; `path` is for messages. What is missing has PEFT's default. Which layers there are is
// what adapter_model.safetensors has; target_modules and its kin are not looked at. FileError for what is not
// such a text, InvalidArgument that names the field where it asks for what pacer cannot do, be it a field
// that pacer does not know.
AdapterConfig parse_adapter_config(std::string text, const std::string& path);

}  // namespace pacer::detail
