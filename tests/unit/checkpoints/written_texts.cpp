// The texts of adapters and of weights in 4 bits keep their bytes from version to version.
#include <pacer/checkpoints/detail/adapter_config.h>
#include <pacer/checkpoints/detail/quant_state.h>

#include "support/catch.h"

namespace pacer::testing {

TEST_CASE("the configuration of an adapter is written as it always was, to the byte",
          "[lora][adapter_files]") {
  detail::AdapterConfig config;
  config.r = 8;
  config.alpha = 100000;
  config.dropout = 0.1;
  config.rslora = true;
  CHECK(detail::adapter_config_text(config, {"b", "a.c"}, {"b", "a.c"}) == R"({
  "alpha_pattern": {},
  "auto_mapping": null,
  "base_model_name_or_path": null,
  "bias": "none",
  "fan_in_fan_out": false,
  "inference_mode": true,
  "init_lora_weights": true,
  "layers_pattern": null,
  "layers_to_transform": null,
  "lora_alpha": 100000,
  "lora_dropout": 0.1,
  "modules_to_save": null,
  "peft_type": "LORA",
  "r": 8,
  "rank_pattern": {},
  "revision": null,
  "target_modules": [
    "a.c",
    "b"
  ],
  "task_type": null,
  "use_dora": false,
  "use_rslora": true
}
)");
  config.alpha_pattern = {{"b", 0.5}, {"a.c", 16}};
  config.rank_pattern = {{"b", 2}};
  config.whole_modules = {"head"};
  const std::string text = detail::adapter_config_text(config, {"b"}, {"b", "x.b"});
  for (const char* part : {R"("alpha_pattern": {
    "b": 0.5,
    "a\\.c": 16
  },
)",
                           R"("modules_to_save": [
    "head"
  ],
)",
                           R"("rank_pattern": {
    "b": 2
  },
)",
                           R"json("target_modules": "(?:b)",
)json"}) {
    CHECK_THAT(text, Catch::Matchers::ContainsSubstring(part));
  }
}

TEST_CASE("what a weight in 4 bits says of itself is written as it always was, to the byte", "[nf4]") {
  detail::QuantState state;
  state.dtype = at::kBFloat16;
  state.shape = {64, 128};
  state.nested = false;
  CHECK(detail::quant_state_text(state, "a") ==
        R"({"quant_type":"nf4","blocksize":64,"dtype":"bfloat16", "shape": [64, 128]})");
  state.nested = true;
  state.offset = 0.5;
  CHECK(detail::quant_state_text(state, "a") ==
        R"({"quant_type":"nf4","blocksize":64,"dtype":"bfloat16", "shape": [64, 128], )"
        R"("nested_blocksize":256,"nested_dtype":"float32","nested_offset":0.5})");
}

}  // namespace pacer::testing
