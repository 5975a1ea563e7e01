#include "facts.h"

#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <thread>

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <dlfcn.h>
#include <torch/version.h>
#include <unistd.h>

#include <pacer/collectives/launch_environment.h>
#include <pacer/core/error.h>

#include "gpu.h"
#include "support/value_in_file.h"

namespace info {
namespace {

namespace fs = std::filesystem;

std::string cpu_info(const std::string& key) { return examples::value_in_file("/proc/cpuinfo", key); }

std::string vector_extensions() {
  std::istringstream flags(cpu_info("flags") + " " + cpu_info("Features"));
  std::string found;
  for (std::string flag; flags >> flag;) {
    for (const char* known : {"avx", "fma", "f16c", "amx", "asimd", "sve", "bf16"}) {
      if (flag.find(known) == std::string::npos) continue;
      found += (found.empty() ? "" : " ") + flag;
      break;
    }
  }
  return found.empty() ? "none known" : found;
}

std::string libtorch_place() {
  Dl_info place{};
  const bool found = dladdr(reinterpret_cast<void*>(&at::get_num_threads), &place) != 0;
  return found && place.dli_fname != nullptr ? place.dli_fname : "unknown";
}

// Also where nothing can be read of it.
std::string state_of(const fs::path& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) return folder.string() + ", not there";
  const auto space = fs::space(folder, error);
  std::string text = folder.string() + (access(folder.c_str(), W_OK) == 0 ? ", writable" : ", not writable");
  if (!error) text += ", " + std::to_string(space.available >> 20) + " MiB free";
  return text;
}

std::string variable(const char* name, const std::string& otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? otherwise : value;
}

Section backends() {
  const std::string gpu = obstacle_to_gpu();
  std::string nccl = gpu.empty() ? "available" : "missing: " + gpu;
  if (gpu.empty() && PACER_INFO_NCCL == 0) {
    nccl =
        "missing: NCCL was not found when pacer was built; install it with LibTorch's CUDA packages "
        "(cmake/bootstrap.sh) and configure again";
  }
  return {"Back-ends",
          {{"NCCL (GPUs)", nccl},
           {"Gloo (CPUs)", "available, comes with LibTorch"},
           {"threads (one process)", "available"}}};
}

Section launch() {
  Section section{"Launch environment", {}};
  try {
    const auto seen = pacer::read_launch_environment();
    section.facts = {
        {"launcher", seen.launcher.empty() ? "none, a single process" : seen.launcher},
        {"rank", std::to_string(seen.rank)},
        {"world size", std::to_string(seen.world_size)},
        {"local rank", std::to_string(seen.local_rank) + " of " + std::to_string(seen.local_size)}};
  } catch (const pacer::Error& error) {
    section.facts = {{"launcher", std::string("cannot be understood: ") + error.what()}};
  }
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"}) {
    section.facts.emplace_back(name, variable(name, "not set"));
  }
  return section;
}

}  // namespace

std::vector<Section> all_facts() {
  const std::string cpu = cpu_info("model name");
  const std::string home = variable("HOME", "/");
  std::error_code error;
  return {{"pacer",
           {{"version", PACER_VERSION},
            {"commit", PACER_COMMIT[0] == '\0' ? "unknown" : PACER_COMMIT},
            {"LibTorch", TORCH_VERSION},
            {"LibTorch's place", libtorch_place()},
            {"compiler", PACER_COMPILER}}},
          {"GPU", gpu_facts()},
          {"CPU",
           {{"name", cpu.empty() ? "unknown" : cpu},
            {"cores", std::to_string(std::thread::hardware_concurrency())},
            {"threads of LibTorch", std::to_string(at::get_num_threads())},
            {"kernels of LibTorch", at::get_cpu_capability()},
            {"vector extensions", vector_extensions()}}},
          backends(),
          launch(),
          {"Folders",
           {{"here", state_of(fs::current_path(error))},
            {"temporary", state_of(variable("TMPDIR", "/tmp"))},
            {"shared memory", state_of("/dev/shm")},
            {"cache", state_of(variable("XDG_CACHE_HOME", home + "/.cache"))}}}};
}

}  // namespace info
