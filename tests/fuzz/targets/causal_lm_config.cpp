// config.json of a folder with a CausalLm.
#include <pacer/checkpoints/detail/causal_lm_config.h>

#include "fuzz/harness.h"

namespace pacer::fuzz {
namespace {

using detail::CausalLmConfig;

const std::string kPath = "config.json";

CausalLmConfig parsed(const std::string& text) { return detail::parse_causal_lm_config(text, kPath); }

}  // namespace

std::vector<std::string> seeds() {
  CausalLmConfig config;
  config.model_type = "qwen3";
  config.vocabulary = 100;
  config.hidden = 64;
  config.ffn = 128;
  config.layers = 3;
  config.heads = 8;
  config.kv_heads = 2;
  config.head_dim = 16;
  config.tied = true;
  std::string fields;
  for (int i = 0; i < 85000; ++i) fields += ",\"" + std::to_string(i) + "\":0";
  const std::string sizes =
      R"("vocab_size":9,"hidden_size":8,"intermediate_size":7,"num_hidden_layers":2,"num_attention_heads":4)";
  return {detail::causal_lm_config_text(config, {2048, "float32"}), R"({"model_type":"llama",)" + sizes + "}",
          R"({"model_type":"qwen2","layer_types":["full_attention"],"rope_scaling":{"type":"default"},)" +
              sizes + "}",
          R"({"model_type":"llama","rope_scaling":{"type":"llama3","factor":8,"low_freq_factor":1,)"
          R"("high_freq_factor":4,"original_max_position_embeddings":64},)" +
              sizes + "}",
          R"({"model_type":"llama")" + fields + "}"};
}

}  // namespace pacer::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pacer;
  const std::string text = fuzz::text_of(data, size);
  fuzz::CausalLmConfig config;
  // Beside the text there is the parser's own copy of it.
  if (!fuzz::accepts(2 * size, [&] { config = fuzz::parsed(text); })) return 0;
  fuzz::demand(config.vocabulary > 0 && config.hidden > 0 && config.ffn > 0 && config.layers > 0 &&
                   config.heads > 0 && config.kv_heads > 0 && config.head_dim >= 0 && config.eps > 0 &&
                   config.theta > 0 && config.init_std >= 0,
               "a model's options are out of range");
  if (config.head_dim == 0)
    return 0;  // fewer channels than heads: no CausalLm is made of it, and none is written
  const fuzz::CausalLmConfig again = fuzz::parsed(detail::causal_lm_config_text(config, {1, "float32"}));
  fuzz::demand(detail::difference(again, config).empty() && again.init_std == config.init_std,
               "options differ after they were written and read again");
  return 0;
}
