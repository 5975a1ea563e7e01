#include <pacer/parallel/pipeline_cut.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <pacer/core/error.h>

namespace pacer {

std::vector<int64_t> balanced_cut(const std::vector<double>& costs, int64_t parts) {
  const auto blocks = static_cast<int64_t>(costs.size());
  require(parts >= 1, "balanced_cut: ", parts, " parts; a pipeline has at least one");
  require(parts <= blocks, "balanced_cut: ", parts, " parts of ", blocks,
          " blocks, but each needs a block; use fewer stages, or cut the model into smaller blocks");
  for (int64_t i = 0; i < blocks; ++i) {
    require(std::isfinite(costs[i]) && costs[i] >= 0, "balanced_cut: block ", i, " costs ", costs[i],
            "; a cost is a finite number, 0 or more");
  }

  // least[p][i]: the smallest largest sum of the blocks from i on in p parts; none, where there are too few.
  constexpr double kNone = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> least(parts + 1, std::vector<double>(blocks + 1, kNone));
  least[0][blocks] = 0;
  for (int64_t p = 1; p <= parts; ++p) {
    for (int64_t i = blocks - p; i >= 0; --i) {
      double sum = 0;
      for (int64_t end = i + 1; end <= blocks; ++end) {
        sum += costs[end - 1];
        least[p][i] = std::min(least[p][i], std::max(sum, least[p - 1][end]));
      }
    }
  }

  // Each part in turn takes as many blocks as leave the rest a cut that is no worse.
  std::vector<int64_t> bounds = {0};
  for (int64_t rest = parts - 1; rest >= 0; --rest) {
    double sum = 0;
    int64_t best = bounds.back();
    for (int64_t end = bounds.back() + 1; end <= blocks - rest; ++end) {
      sum += costs[end - 1];
      if (sum <= least[parts][0] && least[rest][end] <= least[parts][0]) best = end;
    }
    bounds.push_back(best);
  }
  return bounds;
}

}  // namespace pacer
