// What a reader needs to judge the numbers: machine, versions, commit, date.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace bench {

std::vector<std::pair<std::string, std::string>> environment_facts();

}  // namespace bench
