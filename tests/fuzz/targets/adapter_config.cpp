// adapter_config.json of an adapter's folder.
#include <optional>

#include <pacer/checkpoints/detail/adapter_config.h>

#include "fuzz/harness.h"

namespace pacer::fuzz {
namespace {

using detail::AdapterConfig;

const std::string kPath = "adapter_config.json";

AdapterConfig parsed(const std::string& text) { return detail::parse_adapter_config(text, kPath); }

bool are_equal(const AdapterConfig& a, const AdapterConfig& b) {
  return a.r == b.r && a.alpha == b.alpha && a.dropout == b.dropout && a.rslora == b.rslora &&
         a.rank_pattern == b.rank_pattern && a.alpha_pattern == b.alpha_pattern &&
         a.whole_modules == b.whole_modules;
}

}  // namespace

std::vector<std::string> seeds() {
  AdapterConfig config;
  config.alpha = 0.1;
  config.dropout = 0.05;
  config.rslora = true;
  AdapterConfig patterns;
  patterns.rank_pattern = {{"a.b", 3}, {"c-d", 1}};
  patterns.alpha_pattern = {{"b", 0.5}};
  patterns.whole_modules = {"head", "x.\"norm"};
  std::string fields;
  for (int i = 0; i < 85000; ++i) fields += ",\"" + std::to_string(i) + "\":0";
  return {detail::adapter_config_text(config, {"a.b", "c"}, {"a.b", "c", "x.c"}),
          detail::adapter_config_text({}, {"q"}, {"q"}), detail::adapter_config_text(patterns, {"c"}, {"c"}),
          R"({"peft_type":"LORA")" + fields + "}"};
}

}  // namespace pacer::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pacer;
  const std::string text = fuzz::text_of(data, size);
  fuzz::AdapterConfig config;
  // Beside the text there is the parser's own copy of it, and what the shortest key of a pattern, six bytes,
  // takes in a vector that grows.
  if (!fuzz::accepts(30 * size, [&] { config = fuzz::parsed(text); })) return 0;
  fuzz::demand(config.r >= 1 && config.alpha > 0 && config.dropout >= 0 && config.dropout < 1,
               "an adapter's options are out of range");
  const fuzz::AdapterConfig again = fuzz::parsed(detail::adapter_config_text(config, {"a"}, {"a"}));
  fuzz::demand(fuzz::are_equal(again, config), "options differ after they were written and read again");
  return 0;
}
