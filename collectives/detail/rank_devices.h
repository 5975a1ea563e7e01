// On which machine and device each rank is: what ranks tell each other once they have met, and what follows
// from it, the same on all of them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <pacer/collectives/communicator.h>

namespace pacer::detail {

// The devices that a process can train on.
struct ProcessDevices {
  bool has_nccl = false;
  std::string without_nccl;  // why not
  int gpus = 0;              // that it sees
};
ProcessDevices devices_of_process();

// NCCL or Gloo. Throws Unavailable where what is wanted is not to be had, and where a machine with GPUs would
// silently train on its processor. `world_size`: one rank alone needs no NCCL.
CommunicatorBackend choose_backend(CommunicatorBackend wanted, const ProcessDevices& devices, int world_size);

// On which machine and device a rank is; numbers only, as it travels.
struct RankDevice {
  int64_t wanted_ranks_per_node = 0;
  int64_t local_rank = 0, local_size = 1;
  int64_t on_gpu = 0;               // 1: joined by NCCL
  int64_t gpus = 0;                 // that the process sees
  int64_t gpu = 0;                  // its own among them
  std::array<int64_t, 2> gpu_id{};  // the same for the same GPU, whoever sees it; zeros where there is none
};

// The number of a rank's GPU: what the options say, else the only one that it sees, else that of its local
// rank.
int64_t gpu_of(const CommunicatorOptions& options, const ProcessDevices& devices, int64_t local_rank);

// Throws InvalidArgument, with the same words on all ranks, where some have GPUs and others do not, where one
// sees too few, and where two have the same.
void check_devices(const std::vector<RankDevice>& ranks);
// How many ranks each node has; 0 where not all have as many, in a row.
int ranks_of_nodes(const std::vector<RankDevice>& ranks);

}  // namespace pacer::detail
