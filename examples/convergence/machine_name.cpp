// Reads the names from /proc, so that neither LibTorch nor the CUDA runtime is asked for them.
#include "machine_name.h"

#include <filesystem>
#include <fstream>
#include <system_error>

namespace convergence {
namespace {

// The rest of the first line of `path` that begins with `key`, behind its colon; empty where there is none.
std::string value_in(const std::filesystem::path& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const size_t begin = line.find_first_not_of(": \t", key.size());
    return begin == std::string::npos ? std::string() : line.substr(begin);
  }
  return {};
}

}  // namespace

std::string processor_name() {
  const std::string name = value_in("/proc/cpuinfo", "model name");
  return name.empty() ? "CPU" : name;
}

std::string graphics_name() {
  std::error_code error;
  for (const auto& device : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", error)) {
    std::string name = value_in(device.path() / "information", "Model");
    if (!name.empty()) return name;
  }
  return "CUDA device";
}

}  // namespace convergence
