// Asks the CUDA runtime; NCCL only where this process has it already.
#include <cstdint>

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "gpu.h"

namespace info {
namespace {

std::string cuda_version(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string nccl_version() {
  void* const library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return "not loaded";
  using GetVersion = int (*)(int*);
  const auto get = reinterpret_cast<GetVersion>(dlsym(library, "ncclGetVersion"));
  int version = 0;
  if (get == nullptr || get(&version) != 0) return "does not tell its version";
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

std::string obstacle_to_gpu() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error == cudaSuccess && devices > 0) return {};
  return std::string("no GPU can be used (") +
         (error == cudaSuccess ? "none is visible" : cudaGetErrorString(error)) +
         "); check nvidia-smi, the driver's version and CUDA_VISIBLE_DEVICES";
}

std::vector<std::pair<std::string, std::string>> gpu_facts() {
  int runtime = 0, driver = 0, devices = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver);
  if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
  std::vector<std::pair<std::string, std::string>> facts = {
      {"CUDA build", "yes"},
      {"CUDA runtime", cuda_version(runtime)},
      {"driver", driver == 0 ? "none found" : "for CUDA up to " + cuda_version(driver)},
      {"NCCL", nccl_version()}};
  for (int device = 0; device < devices; ++device) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) continue;
    facts.emplace_back("device " + std::to_string(device),
                       std::string(properties.name) + ", " + std::to_string(properties.totalGlobalMem >> 20) +
                           " MiB, compute capability " + std::to_string(properties.major) + "." +
                           std::to_string(properties.minor));
  }
  return facts;
}

}  // namespace info
