// What a reader of the table should look at, arm by arm. No numbers: they differ from text to text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace convergence {

// What there is to say of one arm.
struct Hint {
  std::string arm, text;
  std::string code;  // what to type to use it, in lines; empty where there is nothing to type
  std::string page;  // of docs/; empty with `code`
};

// One for each arm that has one; none for a single arm. `processes`: the ranks that trained together.
std::vector<Hint> hints(const std::vector<std::string>& arms, int64_t processes);

// These as lines of at most 100 characters, each with the arm in front and, below, what to type; empty where
// there are none.
std::string what_to_look_at(const std::vector<std::string>& arms, int64_t processes);

}  // namespace convergence
