// Channels of a head of attention, and heads of keys and values, by the options of a layer or a model, which may leave
// them out.
#pragma once

#include <cstdint>

namespace pacer::detail {

template <class Options>
int64_t head_dim_of(const Options& options) {
  return options.head_dim().value_or(options.hidden() / options.heads());
}
template <class Options>
int64_t kv_heads_of(const Options& options) {
  return options.kv_heads().value_or(options.heads());
}

}  // namespace pacer::detail
