// What a textbook of a 1-bit optimizer does with gradients before its own rule begins: are all of them
// finite, and what is their mean over ranks?
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace pacer::testing {

// [rank][parameter]; none: undefined.
using TextbookGradients = std::vector<std::vector<std::optional<std::vector<float>>>>;

struct TextbookGradientRules {
  int64_t world_size = 1;
  std::function<float(float)> stored;  // rounds sums of 16-bit gradients; null: fp32
  bool divides_first = false;          // fp16 gradients become a mean before they are added
};

inline bool all_finite(const TextbookGradients& gradients) {
  for (const auto& of_rank : gradients) {
    for (const auto& gradient : of_rank) {
      if (!gradient) continue;
      for (const float g : *gradient) {
        if (!(std::fabs(g) < 1e18f)) return false;  // nor is its square beside others' in fp32
      }
    }
  }
  return true;
}

// The mean over ranks of parameter i's gradient of so many elements, times `clip`. None where no rank has
// one; a gradient that only some lack is zero there.
inline std::optional<std::vector<float>> mean_gradient(const TextbookGradientRules& rules,
                                                       const TextbookGradients& gradients, size_t i,
                                                       size_t elements, double clip) {
  if (std::none_of(gradients.begin(), gradients.end(),
                   [&](const auto& of_rank) { return of_rank[i].has_value(); })) {
    return std::nullopt;
  }
  const double share = 1.0 / static_cast<double>(rules.world_size);
  std::vector<float> total;
  for (const auto& of_rank : gradients) {
    std::vector<float> own = of_rank[i].value_or(std::vector<float>(elements, 0));
    if (rules.divides_first) {
      for (float& g : own) g = rules.stored(g * static_cast<float>(share));
    }
    if (&of_rank == &gradients.front()) {
      total = own;
      continue;
    }
    for (size_t k = 0; k < total.size(); ++k) {
      total[k] = total[k] + own[k];
      if (rules.stored) total[k] = rules.stored(total[k]);
    }
  }
  const auto factor = static_cast<float>(rules.divides_first ? clip : clip * share);
  for (float& g : total) g = factor * g;
  return total;
}

}  // namespace pacer::testing
