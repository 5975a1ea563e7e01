// Reads the files in which the system tells of itself: lines of names and values with a colon in between.
#pragma once

#include <fstream>
#include <string>

namespace examples {

// Returns what stands behind the colon of the first line that begins with `key`, in /proc/cpuinfo for example;
// empty where there is none.
inline std::string value_in_file(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const size_t begin = line.find_first_not_of(": \t", key.size());
    return begin == std::string::npos ? std::string() : line.substr(begin);
  }
  return {};
}

}  // namespace examples
