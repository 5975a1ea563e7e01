// adapter_config.json, the options of an adapter as PEFT keeps them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pacer::detail {

struct AdapterConfig {
  int64_t r = 8;
  double alpha = 8;
  double dropout = 0;
  bool rslora = false;
};

// The text for exactly the layers `layers` of a model whose modules are `modules`. PEFT takes a name also for
// the last parts of a longer one; where that would reach other modules, it writes a regular expression
// instead of a list.
std::string adapter_config_text(const AdapterConfig& config, const std::vector<std::string>& layers,
                                const std::vector<std::string>& modules);

// Safe for any bytes; `path` is for messages. What is missing has PEFT's default. Which layers there are is
// what adapter_model.safetensors has; target_modules and its kin are not looked at. FileError for what is not
// such a text, InvalidArgument that names the field where it asks for what pacer cannot do, be it a field
// that pacer does not know.
AdapterConfig parse_adapter_config(std::string text, const std::string& path);

}  // namespace pacer::detail
