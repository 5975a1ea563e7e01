// Order statistics of repeated measurements. Medians, because other users of a machine only ever make things
// slower.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace bench {

struct Spread {
  double median = 0;
  double min = 0;
  double max = 0;
  int64_t count = 0;
};

// All zero for an empty list.
inline Spread spread_of(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  const double median = values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
  return {median, values.front(), values.back(), static_cast<int64_t>(values.size())};
}

}  // namespace bench
