// Operations under way: the order in which they advance is that of their calls, on every rank, whoever waits
// for which of them and when.
#include <chrono>
#include <thread>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/detail/in_process_transport.h>

#include "support/catch.h"
#include "support/optimizers.h"
#include "support/random_program.h"
#include "support/ranks.h"
#include "support/samples.h"

namespace pacer::testing {
namespace {

using namespace std::chrono_literals;

// As threads whose sums are not in rank order unless they are asked for.
Ranks ring_of(int world_size, const CommunicatorOptions& options) {
  Ranks ranks;
  for (auto& connection : detail::connect_in_process(world_size, 0, detail::SumOrder::ring)) {
    ranks.push_back(std::make_shared<Communicator>(std::move(connection), options));
  }
  return ranks;
}

}  // namespace

TEST_CASE("threads can add in another order than that of the ranks", "[collectives]") {
  const float values[] = {1, 1e8F, -1e8F};
  for (const bool ordered : {false, true}) {
    const Ranks world = ring_of(3, CommunicatorOptions().ordered_sum(ordered));
    std::vector<Tensor> sums(3);
    REQUIRE(first_of(run_ranks(3, [&](int rank) {
              sums[static_cast<size_t>(rank)] = torch::full({3}, values[rank]);
              world[static_cast<size_t>(rank)]->all_reduce(sums[static_cast<size_t>(rank)]).wait();
            })) == "");
    for (const Tensor& sum : sums) {
      CHECK(sum.equal(ordered ? torch::zeros({3}) : torch::tensor({0.0F, 1.0F, 0.0F})));
    }
  }
}

TEST_CASE("operations are the same whoever waits for which of them first", "[collectives]") {
  const uint64_t programs = wants_long_tests() ? 1000 : 40;
  for (const int world_size : {1, 2, 3, 5, 8}) {
    for (uint64_t seed = 0; seed < programs; ++seed) {
      const Ranks world = ring_of(world_size, CommunicatorOptions().ordered_sum(true).timeout(20s));
      REQUIRE(first_of(run_ranks(world_size, [&](int rank) {
                RandomPrograms(world[static_cast<size_t>(rank)]).play(seed, 25);
              })) == "");
    }
  }
}

TEST_CASE("an operation of several messages goes on without being waited for", "[collectives]") {
  const Ranks world = ring_of(2, CommunicatorOptions().ordered_sum(true));
  REQUIRE(first_of(run_ranks(2, [&](int rank) {
            Communicator& own = *world[static_cast<size_t>(rank)];
            Tensor dropped = torch::ones({8}), sum = torch::full({4}, float(rank));
            { const Work forgotten = own.all_reduce(dropped); }
            Work work = own.all_reduce(sum);
            while (!work.is_done()) std::this_thread::yield();
            own.barrier();
            work.wait();
            REQUIRE(sum.equal(torch::ones({4})));
          })) == "");
}

}  // namespace pacer::testing
