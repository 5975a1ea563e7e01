// The command line of pacer-bench.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bench {

enum class DeviceChoice { automatic, cpu, cuda };

struct Arguments {
  bool help = false;
  bool list = false;
  bool quick = false;
  std::string filter;  // part of a case name
  DeviceChoice device = DeviceChoice::automatic;
  int threads = 0;          // of the CPU cases; 0: one, then all
  int64_t repetitions = 0;  // 0: enough for the device
  std::string json;         // path, empty for none
};

extern const char* const kHelp;

// Throws pacer::InvalidArgument with one sentence for the user.
Arguments parse_arguments(const std::vector<std::string>& words);

// The member of `names` that `typed` most likely means.
std::string nearest_name(const std::string& typed, const std::vector<std::string>& names);

}  // namespace bench
