// Ranks that meet as processes do, and are joined by Gloo, as threads of one process. Failures need
// processes, and are tried in tests/distributed.
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <pacer/collectives/detail/connect.h>

#include "support/catch.h"
#include "support/collectives/random_program.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"
#include "support/samples.h"
#include "support/temporary_folder.h"

namespace pacer::testing::gloo_ranks {
namespace {

using namespace std::chrono_literals;

CommunicatorOptions over_gloo() {
  return CommunicatorOptions().backend(CommunicatorBackend::gloo).timeout(20s);
}

detail::Connection connected(int rank, int world_size, const std::string& file) {
  detail::RendezvousSettings settings;
  settings.rank = settings.local_rank = rank;
  settings.world_size = settings.local_size = world_size;
  settings.file = file;
  return detail::connect(settings, over_gloo());
}

}  // namespace

TEST_CASE("a connection joins processes where there are several ranks", "[collectives][rendezvous]") {
  const TemporaryFolder folder;
  for (const int world_size : {1, 2}) {
    REQUIRE(first_of(run_ranks(world_size, [&](int rank) {
              const auto connection = connected(rank, world_size, folder.path(std::to_string(world_size)));
              require(connection.joins_processes == (world_size > 1), "it joins something else");
              require(connection.local_rank == rank, "another place on this host");
            })) == "");
  }
}

TEST_CASE("random programs over Gloo have the bits of one process", "[collectives][groups]") {
  const TemporaryFolder folder;
  for (const int world_size : {2, 3}) {
    CAPTURE(world_size);
    REQUIRE(first_of(run_ranks(world_size, [&](int rank) {
              const auto world = std::make_shared<Communicator>(
                  connected(rank, world_size, folder.path(std::to_string(world_size))),
                  over_gloo().ordered_sum(true));
              RandomPrograms programs(world);
              for (uint64_t seed = 0; seed < 6; ++seed) programs.play(seed, 25);
            })) == "");
  }
}

TEST_CASE("sums over Gloo are whole where nobody asks for their order, and single bytes arrive",
          "[collectives]") {
  const TemporaryFolder folder;
  constexpr int kRanks = 3;
  REQUIRE(first_of(run_ranks(kRanks, [&](int rank) {
            Communicator world(connected(rank, kRanks, folder.path("ranks")), over_gloo());
            for (const int64_t count : {1, 1000}) {
              // Whole numbers, whose sums are exact: element i of rank r is i + 1000 r.
              const Tensor own = torch::arange(kRanks * count, torch::kFloat) + 1000 * rank;
              const Tensor sum = 3 * torch::arange(kRanks * count, torch::kFloat) + 3000;
              const Tensor part = torch::zeros({count});
              world.reduce_scatter(part, own).wait();
              require(part.equal(sum.narrow(0, rank * count, count)), "another part of ", count);
              world.all_reduce(own).wait();
              require(own.equal(sum), "another sum of ", count);
            }
            const Tensor sent = torch::arange(kRanks, torch::kByte) + 10 * rank,
                         came = torch::zeros_like(sent);
            world.all_to_all(came, sent).wait();  // a byte for each rank
            require(came.equal(10 * torch::arange(kRanks, torch::kByte) + rank), "other bytes: ", came);
          })) == "");
}

// c10d keeps one record of the operations of all groups in a process, which each enters with its first one.
TEST_CASE("groups over Gloo may begin at once, on several threads", "[collectives][groups]") {
  const TemporaryFolder folder;
  constexpr int kRanks = 2, kLanes = 40;
  const int rounds = wants_long_tests() ? 40 : 2;
  std::atomic<int> ready{0};
  REQUIRE(first_of(run_ranks(kRanks, [&](int rank) {
            for (int round = 0; round < rounds; ++round) {
              const auto world = std::make_shared<Communicator>(
                  connected(rank, kRanks, folder.path(std::to_string(round))), over_gloo());
              std::vector<std::shared_ptr<Communicator>> lanes;
              for (int i = 0; i < kLanes; ++i) lanes.push_back(world->lane("lane " + std::to_string(i)));
              ++ready;
              const auto limit = std::chrono::steady_clock::now() + 20s;
              while (ready < kRanks * (round + 1) && std::chrono::steady_clock::now() < limit) {
                std::this_thread::yield();
              }
              const Tensor sums = torch::arange(kLanes) + rank;
              std::vector<Work> works;
              for (int i = 0; i < kLanes; ++i) {
                works.push_back(lanes[static_cast<size_t>(i)]->all_reduce(sums.narrow(0, i, 1),
                                                                          CollectiveOptions().agreed(true)));
              }
              for (Work& work : works) work.wait();
              require(sums.equal(kRanks * torch::arange(kLanes) + 1), "other sums in round ", round);
            }
          })) == "");
}

}  // namespace pacer::testing::gloo_ranks
