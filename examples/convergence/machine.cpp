// LibTorch's global settings, threads and the arithmetic of matrix products; and the other ranks.
#include "machine.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <thread>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <torch/cuda.h>
#include <torch/utils.h>

#include <pacer/core/error.h>

#include "format.h"
#include "support/processes.h"
#include "support/value_in_file.h"

namespace convergence {
namespace {

// Names are read from /proc, so that neither LibTorch nor the CUDA runtime is asked for them.
std::string processor_name() {
  const std::string name = examples::value_in_file("/proc/cpuinfo", "model name");
  return name.empty() ? "CPU" : name;
}

std::string graphics_name() {
  std::error_code error;
  for (const auto& device : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", error)) {
    std::string name = examples::value_in_file(device.path() / "information", "Model");
    if (!name.empty()) return name;
  }
  return "CUDA device";
}

}  // namespace

bool uses_cuda(const Settings& settings) { return settings.device != "cpu" && torch::cuda::is_available(); }

int64_t choose_processes(const Settings& settings) {
  if (const std::optional<int> started = examples::started_processes()) {
    pacer::require(settings.processes <= 1 || *started == 1 || settings.processes == *started,
                   settings.processes, " processes are asked for, but the launcher has started ", *started,
                   "; leave --processes out");
    if (*started > 1) return *started;
  }
  if (settings.processes > 0) return settings.processes;
  const auto gpus = settings.device == "cpu" ? 0 : static_cast<int64_t>(torch::cuda::device_count());
  const int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  int64_t processes = std::min(gpus > 0 ? gpus : std::min<int64_t>(2, cores), settings.batch);
  while (settings.batch % processes != 0) --processes;
  return processes;
}

Machine prepare_machine(const Settings& settings) {
  const bool has_cuda = torch::cuda::is_available();
  pacer::require(settings.device != "cuda" || has_cuda,
                 "--device cuda: no CUDA device can be used here; --device cpu always works");
  const bool use_cuda = uses_cuda(settings);
  pacer::require(settings.precision != "tensorfloat32" || use_cuda,
                 "--precision tensorfloat32 needs a CUDA device; on the CPU take float32 or bfloat16");
  at::globalContext().setAllowTF32CuBLAS(settings.precision == "tensorfloat32");
  Machine machine;
  if (settings.processes == 1) {
    machine.world = pacer::Communicator::alone(use_cuda ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU));
  } else {
    const auto backend = use_cuda ? pacer::CommunicatorBackend::nccl : pacer::CommunicatorBackend::gloo;
    auto options = pacer::CommunicatorOptions().backend(backend);
    if (settings.ranks_per_node > 0) options.ranks_per_node(static_cast<int>(settings.ranks_per_node));
    machine.world = examples::join_processes(options);
  }
  const int64_t processes = machine.world->world_size();
  if (settings.threads > 0) torch::set_num_threads(static_cast<int>(settings.threads));
  if (!use_cuda) {
    const int threads = at::get_num_threads();
    machine.description = processor_name() + ", " +
                          (processes > 1 ? count_of(processes, "process", "es") + " of " : std::string()) +
                          count_of(threads, "thread");
  } else {
    machine.description =
        (processes > 1 ? std::to_string(processes) + " x " : std::string()) + graphics_name();
  }
  return machine;
}

}  // namespace convergence
