// config.json of a folder of Hugging Face that has a Llama, Qwen2 or Qwen3: what of it decides what the model computes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace pacer::detail {

// Positions of the rope_type "llama3", by its fields' names: factor >= 1, 0 < low_freq_factor < high_freq_factor,
// original_max_position_embeddings >= 1.
struct RopeScaling {
  double factor = 0, low_freq_factor = 0, high_freq_factor = 0;
  int64_t original_length = 0;

  bool operator==(const RopeScaling& other) const {
    return factor == other.factor && low_freq_factor == other.low_freq_factor &&
           high_freq_factor == other.high_freq_factor && original_length == other.original_length;
  }
};

struct CausalLmConfig {
  std::string
      model_type;  // "llama", "qwen2" (biases of queries, keys and values) or "qwen3" (norms of heads)
  int64_t vocabulary = 0, hidden = 0, ffn = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0;
  double eps = 1e-6, theta = 10'000, init_std = 0.02;
  std::optional<RopeScaling> scaling;
  bool tied = false;
};

// What readers want to know beside it, and CausalLm has no use for.
struct CausalLmNotes {
  int64_t max_positions = 0;
  std::string dtype;  // "float32", "bfloat16" or "float16"
};

// The text, for transformers 4 and 5.
std::string causal_lm_config_text(const CausalLmConfig& config, const CausalLmNotes& notes);

// Safe for any bytes; `path` is for messages. What is missing has transformers' default, the sizes aside, which must be
// there. FileError for what is no such text, InvalidArgument that names the field where it asks for what CausalLm cannot
// do, be it a field that pacer does not know.
CausalLmConfig parse_causal_lm_config(std::string text, const std::string& path);

// "rope_theta 500000 there, but 10000 in the model", for the first field in which the two differ; empty where none does. How
// weights start does not count.
std::string difference(const CausalLmConfig& there, const CausalLmConfig& model);

}  // namespace pacer::detail
