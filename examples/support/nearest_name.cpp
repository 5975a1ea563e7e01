// Edit distance over a handful of names.
#include "support/nearest_name.h"

#include <algorithm>

#include <pacer/files/json_scanner.h>

namespace examples {
namespace {

// Optimal string alignment: insertions, deletions, replacements and swaps of neighbours cost one each.
size_t edit_distance(const std::string& from, const std::string& to) {
  std::vector<std::vector<size_t>> cost(from.size() + 1, std::vector<size_t>(to.size() + 1));
  for (size_t i = 0; i <= from.size(); ++i) {
    for (size_t j = 0; j <= to.size(); ++j) {
      if (i == 0 || j == 0) {
        cost[i][j] = i + j;
        continue;
      }
      const size_t replaced = cost[i - 1][j - 1] + (from[i - 1] == to[j - 1] ? 0 : 1);
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, replaced});
      if (i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1]) {
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
      }
    }
  }
  return cost[from.size()][to.size()];
}

}  // namespace

std::string shown(const std::string& text) {
  std::string quoted = pacer::quote_for_message(text);
  quoted.erase(quoted.rfind('"'), 1);
  return quoted.substr(1);
}

std::string nearest_name(const std::string& typed, const std::vector<std::string>& names) {
  size_t longest = 0;
  for (const auto& name : names) longest = std::max(longest, name.size());
  // So long a text is none of them, and the table of its distances would be large.
  if (typed.size() > 3 * longest) return "";
  std::string nearest;
  size_t smallest = 0;
  for (const auto& name : names) {
    const size_t distance = edit_distance(typed, name);
    if (nearest.empty() || distance < smallest) {
      nearest = name;
      smallest = distance;
    }
  }
  const size_t tolerable = std::max<size_t>(2, std::min(typed.size(), nearest.size()) / 2);
  return smallest <= tolerable ? nearest : std::string();
}

std::string suggestion(const std::string& typed, const std::vector<std::string>& names) {
  const std::string nearest = nearest_name(typed, names);
  if (!nearest.empty()) return "did you mean '" + nearest + "'?";
  std::string text = "known are ";
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " and " : ", ";
    text += "'" + names[i] + "'";
  }
  return text;
}

}  // namespace examples
