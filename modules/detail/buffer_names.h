// Tells running statistics by the names of their buffers.
#pragma once

#include <string>

namespace pacer::detail {

// LibTorch's kernels write running statistics without counting a version. `name`: with those of the modules
// above it, or without.
inline bool is_running_statistic(const std::string& name) {
  const std::string last = name.substr(name.rfind('.') + 1);
  return last == "running_mean" || last == "running_var";
}

}  // namespace pacer::detail
