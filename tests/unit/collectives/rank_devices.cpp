// On which device each rank trains: what follows from what ranks tell of their machines, and what is refused.
#include <pacer/collectives/detail/rank_devices.h>
#include <pacer/core/error.h>

#include "support/catch.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing {
namespace {

using detail::choose_backend;
using detail::ProcessDevices;
using detail::RankDevice;

const ProcessDevices kNoGpu{true, "", 0}, kFourGpus{true, "", 4}, kOneGpu{true, "", 1};
const ProcessDevices kNoNccl{false, "nccl.h was not found when this pacer was built", 4};
const ProcessDevices kNoCuda{false, "this build has no CUDA", 0};

std::vector<RankDevice> eight_ranks_on_two_hosts() {
  std::vector<RankDevice> ranks(8);
  for (int64_t rank = 0; rank < 8; ++rank) {
    RankDevice& place = ranks[static_cast<size_t>(rank)];
    place.local_rank = place.gpu = rank % 4;
    place.local_size = place.gpus = 4;
    place.on_gpu = 1;
    place.gpu_id = {7, rank};
  }
  return ranks;
}

}  // namespace

TEST_CASE("the back-end follows from the machine, and is never the slower one without a word", "[launch]") {
  using B = CommunicatorBackend;
  CHECK(choose_backend(B::automatic, kFourGpus, 4) == B::nccl);
  CHECK(choose_backend(B::automatic, kNoGpu, 4) == B::gloo);
  CHECK(choose_backend(B::automatic, kNoCuda, 4) == B::gloo);
  CHECK(choose_backend(B::gloo, kFourGpus, 4) == B::gloo);
  CHECK(choose_backend(B::automatic, kNoNccl, 1) == B::nccl);  // alone, on its GPU
  const auto message = [](B wanted, const ProcessDevices& devices) {
    return refusal([&] { choose_backend(wanted, devices, 4); });
  };
  const std::string silent = message(B::automatic, kNoNccl);
  CHECK(contains(silent, "this machine has 4 GPUs, but no way to join ranks on them: nccl.h was not found"));
  CHECK(contains(silent, "ask for CommunicatorBackend::gloo"));
  CHECK(contains(message(B::nccl, kNoNccl), "NCCL was asked for, but nccl.h was not found"));
  CHECK(contains(message(B::nccl, kNoGpu), "there is no GPU on this machine"));
}

TEST_CASE("a rank's GPU is what the options say, the only one, or that of its local rank", "[launch]") {
  CommunicatorOptions options;
  CHECK(detail::gpu_of(options, kFourGpus, 3) == 3);
  CHECK(detail::gpu_of(options, kOneGpu, 3) == 0);
  CHECK(detail::gpu_of(options.gpu(2), kFourGpus, 3) == 2);
  CHECK(detail::gpu_of(options.gpu(2), kOneGpu, 3) == 2);  // refused below
}

TEST_CASE("ranks of several hosts need a GPU each, however their processes see it", "[launch]") {
  const auto refused = [](std::vector<RankDevice> ranks) {
    return refusal([&] { detail::check_devices(ranks); });
  };
  auto ranks = eight_ranks_on_two_hosts();
  CHECK(refused(ranks) == "<no exception>");
  CHECK(detail::ranks_of_nodes(ranks) == 4);
  for (auto& rank : ranks) {  // each process is shown one GPU
    rank.gpus = 1;
    rank.gpu = 0;
  }
  CHECK(refused(ranks) == "<no exception>");
  ranks[6].gpu_id = ranks[5].gpu_id;
  CHECK(contains(refused(ranks), "ranks 5 and 6 have the same GPU"));

  ranks = eight_ranks_on_two_hosts();
  ranks[7].gpus = 3;
  CHECK(contains(refused(ranks), "rank 7 is to use GPU 3, but its process sees 3, and its host has 4 ranks"));
  ranks[7].gpu = -1;
  CHECK(contains(refused(ranks), "rank 7 is to use GPU -1"));
  ranks = eight_ranks_on_two_hosts();
  ranks[2].on_gpu = 0;
  CHECK(contains(refused(ranks), "rank 0 trains on a GPU, but rank 2 on a CPU"));
  for (auto& rank : ranks) rank = RankDevice();  // on CPUs
  CHECK(refused(ranks) == "<no exception>");
}

TEST_CASE("nodes have as many ranks each, in a row, or none is known", "[launch]") {
  auto ranks = eight_ranks_on_two_hosts();
  ranks[3].local_rank = 2;
  CHECK(detail::ranks_of_nodes(ranks) == 0);
  for (auto& rank : ranks) rank.wanted_ranks_per_node = 2;
  CHECK(detail::ranks_of_nodes(ranks) == 2);
  ranks[1].wanted_ranks_per_node = 4;
  CHECK(contains(refusal([&] { detail::ranks_of_nodes(ranks); }), "ranks_per_node is 2 on rank 0, but 4 on"));
}

}  // namespace pacer::testing
