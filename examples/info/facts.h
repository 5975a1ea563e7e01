// What a bug report needs and a newcomer asks: versions, machine, back-ends, launch environment, folders.
// Each fact is a name and a text for people; what is missing comes with a sentence that says how to get it.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace info {

struct Section {
  std::string title;
  std::vector<std::pair<std::string, std::string>> facts;
};

// Looks at everything, throws nothing for what is missing.
std::vector<Section> all_facts();

}  // namespace info
