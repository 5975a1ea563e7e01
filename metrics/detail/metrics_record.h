// One record of the Metrics hook, with all values on the host.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace pacer::detail {

struct MetricsRecord {
  int64_t step = 0;
  int64_t tokens = 0;
  std::vector<std::pair<std::string, double>> values;  // in the order of the files

  std::optional<double> find(std::string_view name) const {
    for (const auto& [key, value] : values) {
      if (key == name) return value;
    }
    return std::nullopt;
  }
};

}  // namespace pacer::detail
