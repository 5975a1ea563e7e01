// Which hooks are tried together, and with which optimizers. In a long run each with each; in a short one those
// take turns that have nothing of their own to try: forms of a rule that another row has, and pairs.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "support/samples.h"
#include "support/session/registry.h"

namespace pacer::testing {

// Each hook by itself, and one in so many of every two that may be used together, from the one of that place on.
inline std::vector<std::vector<RegisteredHook>> hooks_and_pairs(int one_in = 1, int first = 0) {
  const auto hooks = all_hooks();
  std::vector<std::vector<RegisteredHook>> chosen;
  Turns turns(one_in, first);
  for (size_t a = 0; a < hooks.size(); ++a) {
    chosen.push_back({hooks[a]});
    for (size_t b = a + 1; b < hooks.size(); ++b) {
      if (hooks[a].kind != hooks[b].kind && turns.is_next()) chosen.push_back({hooks[a], hooks[b]});
    }
  }
  return chosen;
}

// Whether another row of all_optimizers() has the same rule, with other storage or settings.
inline bool is_form(const RegisteredOptimizer& optimizer) {
  return optimizer.name.find(' ') != std::string::npos;
}

// Whether a rank does with them what one process does not that takes the shards of all ranks: it has a part of
// the sampler's data, or drops rows of its own.
inline bool differ_by_rank(const std::vector<RegisteredHook>& hooks) {
  return std::any_of(hooks.begin(), hooks.end(), [](const RegisteredHook& hook) {
    return hook.kind == "sampler" || hook.name == "layer drop by sample";
  });
}
inline std::string names_of(const std::vector<RegisteredHook>& hooks) {
  std::string names;
  for (const RegisteredHook& hook : hooks) names += (names.empty() ? "" : " with ") + hook.name;
  return names;
}

}  // namespace pacer::testing
