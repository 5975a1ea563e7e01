#include <pacer/collectives/detail/rank_devices.h>

#include <map>

#include <pacer/collectives/detail/connect.h>
#include <pacer/core/error.h>
#include <pacer/device/detail/stream.h>

namespace pacer::detail {

ProcessDevices devices_of_process() {
  ProcessDevices devices;
  devices.has_nccl = has_nccl(&devices.without_nccl);
  devices.gpus = gpu_count();
  return devices;
}

CommunicatorBackend choose_backend(CommunicatorBackend wanted, const ProcessDevices& devices,
                                   int world_size) {
  constexpr const char* kAdvice = "; ask for CommunicatorBackend::gloo to train on CPUs";
  if (wanted == CommunicatorBackend::automatic) {
    if (devices.gpus == 0) return CommunicatorBackend::gloo;
    require<Unavailable>(devices.has_nccl || world_size == 1, "this machine has ", devices.gpus,
                         " GPUs, but no way to join ranks on them: ", devices.without_nccl, kAdvice);
    return CommunicatorBackend::nccl;
  }
  if (wanted == CommunicatorBackend::gloo) return wanted;
  require<Unavailable>(devices.has_nccl, "NCCL was asked for, but ", devices.without_nccl, kAdvice);
  require<Unavailable>(devices.gpus > 0,
                       "NCCL was asked for, but there is no GPU on this machine (or no driver for it)",
                       kAdvice);
  return wanted;
}

int64_t gpu_of(const CommunicatorOptions& options, const ProcessDevices& devices, int64_t local_rank) {
  if (options.gpu()) return *options.gpu();
  return devices.gpus == 1 ? 0 : local_rank;
}

void check_devices(const std::vector<RankDevice>& ranks) {
  std::map<std::array<int64_t, 2>, size_t> rank_of_gpu;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const RankDevice &place = ranks[rank], &first = ranks.front();
    require(place.on_gpu == first.on_gpu, "rank 0 trains on ", first.on_gpu ? "a GPU" : "a CPU",
            ", but rank ", rank, " on ", place.on_gpu ? "a GPU" : "a CPU",
            "; give every rank a GPU, or ask for CommunicatorBackend::gloo on all of them");
    if (!place.on_gpu) continue;
    require(place.gpu >= 0 && place.gpu < place.gpus, "rank ", rank, " is to use GPU ", place.gpu,
            ", but its process sees ", place.gpus, ", and its host has ", place.local_size,
            " ranks; start fewer ranks there, show each process all GPUs or one of its own, or set "
            "CommunicatorOptions::gpu");
    const auto [other, is_first] = rank_of_gpu.emplace(place.gpu_id, rank);
    require(is_first, "ranks ", other->second, " and ", rank, " have the same GPU, number ", place.gpu,
            " of those that rank ", rank,
            " sees; show each process another one in CUDA_VISIBLE_DEVICES, or set CommunicatorOptions::gpu");
  }
}

int ranks_of_nodes(const std::vector<RankDevice>& ranks) {
  const RankDevice& first = ranks.front();
  const auto world = static_cast<int64_t>(ranks.size());
  bool alike = first.local_size > 0 && world % first.local_size == 0;
  for (int64_t rank = 0; rank < world; ++rank) {
    const RankDevice& place = ranks[static_cast<size_t>(rank)];
    require(place.wanted_ranks_per_node == first.wanted_ranks_per_node, "ranks_per_node is ",
            first.wanted_ranks_per_node, " on rank 0, but ", place.wanted_ranks_per_node, " on rank ", rank,
            "; set it to the same number everywhere, or nowhere");
    alike = alike && place.local_size == first.local_size && place.local_rank == rank % first.local_size;
  }
  if (first.wanted_ranks_per_node > 0) return static_cast<int>(first.wanted_ranks_per_node);
  return alike ? static_cast<int>(first.local_size) : 0;
}

}  // namespace pacer::detail
