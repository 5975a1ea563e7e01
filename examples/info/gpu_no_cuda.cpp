// Asks /proc only.
#include <fstream>

#include "gpu.h"

namespace info {

std::string obstacle_to_gpu() {
  return "this build has no CUDA (" PACER_CUDA_OBSTACLE
         "); install LibTorch's CUDA packages with cmake/bootstrap.sh and configure again";
}

std::vector<std::pair<std::string, std::string>> gpu_facts() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string driver;
  if (!std::getline(file, driver)) driver = "none found";
  return {{"CUDA build", "no: " PACER_CUDA_OBSTACLE}, {"driver", driver}};
}

}  // namespace info
