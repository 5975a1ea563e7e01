#include <pacer/checkpoints/detail/causal_lm_names.h>

#include <initializer_list>
#include <utility>

#include <pacer/core/error.h>
#include <pacer/modules/detail/head_sizes.h>

namespace pacer::detail {

std::vector<CausalLmName> causal_lm_names(const modules::CausalLmOptions& options) {
  const int64_t head_dim = head_dim_of(options);
  const int64_t queries = options.heads() * head_dim, keys = kv_heads_of(options) * head_dim;
  std::vector<CausalLmName> names = {{"model.embed_tokens", "embedding"}, {"model.norm", "norm"}};
  if (!options.tied()) names.push_back({"lm_head", "head"});
  for (int64_t i = 0; i < options.layers(); ++i) {
    const std::string theirs = concatenate("model.layers.", i, '.'), own = concatenate("layers.", i, '.');
    const auto put = [&](const char* name, const char* module) {
      names.push_back({theirs + name, own + module});
    };
    const auto put_rows = [&](const char* module,
                              std::initializer_list<std::pair<const char*, int64_t>> rows) {
      int64_t first = 0;
      for (const auto& [name, count] : rows) {
        names.push_back({theirs + name, own + module, first, count});
        first += count;
      }
    };
    put("input_layernorm", "qkv.norm");
    put_rows("qkv.linear",
             {{"self_attn.q_proj", queries}, {"self_attn.k_proj", keys}, {"self_attn.v_proj", keys}});
    if (options.qk_norm()) {
      put("self_attn.q_norm", "q_norm");
      put("self_attn.k_norm", "k_norm");
    }
    put("self_attn.o_proj", "projection");
    put("post_attention_layernorm", "mlp.norm");
    put_rows("mlp.fc1", {{"mlp.gate_proj", options.ffn()}, {"mlp.up_proj", options.ffn()}});
    put("mlp.down_proj", "mlp.fc2");
  }
  return names;
}

}  // namespace pacer::detail
