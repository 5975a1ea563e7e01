// What a reader of the table should look at, arm by arm. No numbers: they differ from text to text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace convergence {

// One line for each arm that has one to say, with the arm in front; empty for a single arm. `processes`: the
// ranks that trained together.
std::string what_to_look_at(const std::vector<std::string>& arms, int64_t processes);

}  // namespace convergence
