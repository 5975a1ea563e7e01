// The modules of a CausalLm by the names that transformers gives them. Some of them are rows of one layer here: queries,
// keys and values, and both halves of SwiGLU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <pacer/modules/causal_lm.h>

namespace pacer::detail {

struct CausalLmName {
  std::string theirs;  // "model.layers.0.self_attn.k_proj"
  std::string own;     // "layers.0.qkv.linear"
  int64_t first = 0;   // of its rows in the weight
  int64_t count = 0;   // how many; 0: the whole module
};

// All modules with weights; those of one layer follow each other in the order of its rows. A head that is tied to the
// embedding is none.
std::vector<CausalLmName> causal_lm_names(const modules::CausalLmOptions& options);

}  // namespace pacer::detail
