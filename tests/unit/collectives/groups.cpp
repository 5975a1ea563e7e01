// Groups and lanes: who is in them and under which number, what they share with the world, and what becomes
// of them where a rank fails or ends.
#include <chrono>
#include <thread>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/detail/in_process_transport.h>
#include <pacer/core/error.h>

#include "distributed/faulty_transport.h"
#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing {
namespace {

using namespace std::chrono_literals;

std::vector<int> ranks_of(const Communicator& group) {
  std::vector<int> ranks;
  for (int rank = 0; rank < group.world_size(); ++rank) ranks.push_back(group.rank_in_world(rank));
  return ranks;
}

float sum_over(Communicator& group, float own) {
  Tensor x = torch::full({3}, own);
  group.all_reduce(x).wait();
  return x[0].item<float>();
}

// Threads whose small messages take the way of processes; counts its hops.
class ManyHops : public FaultyTransport {
 public:
  ManyHops(std::shared_ptr<detail::Transport> real, std::shared_ptr<int> hops)
      : FaultyTransport(
            std::move(real), "exchange", /*at=*/-1, false, [] {}, std::move(hops)) {}
  bool gathers_in_one_hop() const override { return false; }
};

// A transport that has found out that something is wrong, as NCCL does by itself.
class Unplugged : public FaultyTransport {
 public:
  explicit Unplugged(std::shared_ptr<detail::Transport> real)
      : FaultyTransport(
            std::move(real), "", /*at=*/-1, false, [] {}, std::make_shared<int>(0)) {}
  void check() override { throw Error("a cable is unplugged"); }
};

}  // namespace

TEST_CASE("what a transport finds out by itself, check() says", "[collectives]") {
  detail::Connection connection = detail::connect_in_process(1)[0];
  Communicator sound(connection, CommunicatorOptions());
  CHECK_NOTHROW(sound.check());
  connection = detail::connect_in_process(1)[0];
  connection.data = std::make_shared<Unplugged>(connection.data);
  Communicator broken(std::move(connection), CommunicatorOptions());
  CHECK_THROWS_AS(broken.check(), CommunicationError);
  CHECK(broken.has_failed());
}

TEST_CASE("what every rank tells all others takes log2 of their number in hops", "[collectives][groups]") {
  for (const auto& [world_size, hops] :
       {std::pair{1, 0}, {2, 1}, {3, 2}, {4, 2}, {5, 3}, {8, 3}, {13, 4}, {33, 6}}) {
    Ranks world;
    std::vector<std::shared_ptr<int>> counted;
    for (detail::Connection& connection : detail::connect_in_process(world_size)) {
      counted.push_back(std::make_shared<int>(0));
      connection.control = std::make_shared<ManyHops>(connection.control, counted.back());
      world.push_back(std::make_shared<Communicator>(std::move(connection), CommunicatorOptions()));
    }
    CAPTURE(world_size);
    REQUIRE(first_of(run_ranks(world_size, [&](int rank) {
              const auto r = static_cast<size_t>(rank);
              const std::string own(r + 1, static_cast<char>('a' + rank));
              const std::vector<std::string> texts = world[r]->exchange(own);
              for (size_t other = 0; other < texts.size(); ++other) {
                require(texts[other] == std::string(other + 1, static_cast<char>('a' + other)),
                        "another text");
              }
              require(*counted[r] == 2 * hops, "lengths and texts took ", *counted[r], " hops");
            })) == "");
  }
}

TEST_CASE("a group has the ranks of one color, in the order of their keys", "[collectives][groups]") {
  const auto world = Communicator::in_process(6, CommunicatorOptions().ranks_per_node(2));
  REQUIRE(
      first_of(run_ranks(6, [&](int rank) {
        Communicator& own = *world[static_cast<size_t>(rank)];
        own.set_phase("test");
        const auto parity = own.split(rank % 2, -rank);
        RANK_REQUIRE(ranks_of(*parity) ==
                     (rank % 2 == 0 ? std::vector<int>{4, 2, 0} : std::vector<int>{5, 3, 1}));
        RANK_REQUIRE(parity->rank() == 2 - rank / 2);
        RANK_REQUIRE(parity->name() == detail::concatenate("group ", rank % 2, " of split 1"));
        RANK_REQUIRE(sum_over(*parity, float(rank)) == (rank % 2 == 0 ? 6 : 9));
        // Ties by rank; a rank that is in no group; groups of groups.
        const auto some = own.split(rank == 3 ? -1 : 0, 7, "some");
        RANK_REQUIRE((some == nullptr) == (rank == 3));
        if (some == nullptr) return;
        RANK_REQUIRE(ranks_of(*some) == std::vector<int>{0, 1, 2, 4, 5});
        const auto halves = some->split(some->rank() < 2 ? 0 : 1, 0, "halves");
        RANK_REQUIRE(ranks_of(*halves) == (rank < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 4, 5}));
        RANK_REQUIRE(halves->name() == "halves of some");
        RANK_REQUIRE(sum_over(*halves, 1) == (rank < 2 ? 2 : 3));
        // What is on one node, and who shares a host.
        RANK_REQUIRE(halves->ranks_per_node() == (rank < 2 ? 2 : 0));
        RANK_REQUIRE(halves->local_size() == halves->world_size());
        RANK_REQUIRE(halves->local_rank() == halves->rank());
        RANK_REQUIRE(traffic_of(own, "all_reduce", "test").calls == 2);
        RANK_REQUIRE(own.traffic().back().group == "halves of some");
      })) == "");
}

TEST_CASE("counters do not grow with groups that are made again and again", "[collectives][groups]") {
  const auto world = Communicator::in_process(2);
  REQUIRE(first_of(run_ranks(2, [&](int rank) {
            Communicator& own = *world[static_cast<size_t>(rank)];
            size_t entries = 0;
            for (int round = 1; round <= 3; ++round) {
              const auto group = own.split(0, 0);
              RANK_REQUIRE(sum_over(*group->lane("side"), 1) == 2);
              if (round == 1) entries = own.traffic().size();
            }
            const auto traffic = own.traffic();
            RANK_REQUIRE(traffic.size() == entries);
            RANK_REQUIRE(traffic.back().group == "lane side of group 0");
            RANK_REQUIRE(traffic.back().calls == 3);
          })) == "");
}

TEST_CASE("a single rank can be split off, and a world of one can be split", "[collectives][groups]") {
  const auto world = Communicator::in_process(2);
  REQUIRE(first_of(run_ranks(2, [&](int rank) {
            const auto own = world[static_cast<size_t>(rank)]->split(rank, 0);
            RANK_REQUIRE(ranks_of(*own) == std::vector<int>{rank});
            RANK_REQUIRE(sum_over(*own, 5) == 5);
          })) == "");
  const auto alone = Communicator::alone(at::kCPU);
  CHECK(sum_over(*alone->split(3, 0), 2) == 2);
  CHECK(sum_over(*alone->lane("other"), 2) == 2);
  CHECK(sum_over(*alone->node(), 2) == 2);
  CHECK(alone->split(-1, 0) == nullptr);
}

TEST_CASE("what waits in a lane holds up nothing outside of it", "[collectives][groups]") {
  const auto world = Communicator::in_process(2);
  REQUIRE(first_of(run_ranks(2, [&](int rank) {
            Communicator& own = *world[static_cast<size_t>(rank)];
            const auto lane = own.lane("pairs");
            RANK_REQUIRE(own.lane("pairs") == lane);
            RANK_REQUIRE(own.lane("others") != lane);
            RANK_REQUIRE(lane->name() == "lane pairs");
            Tensor received = torch::zeros({4}), sum = torch::ones({4});
            Work work;
            if (rank == 0) work = lane->receive(received, 1);
            const auto ordered = CollectiveOptions().ordered_sum(true);
            own.all_reduce(sum, ordered).wait();
            if (rank == 0) RANK_REQUIRE(!work.is_done());
            own.barrier();
            if (rank == 1) work = lane->send(torch::full({4}, 7.0F), 0);
            work.wait();
            RANK_REQUIRE((rank == 1 || received.eq(7).all().item<bool>()));
            RANK_REQUIRE(sum.eq(2).all().item<bool>());
          })) == "");
}

// As the neighbours of a pipeline do: activations go up while gradients come down.
TEST_CASE("messages that cross do not wait for each other", "[collectives][groups]") {
  const auto world = Communicator::in_process(4);
  REQUIRE(first_of(run_ranks(4, [&](int rank) {
            Communicator& own = *world[static_cast<size_t>(rank)];
            for (int64_t round = 0; round < 1000; ++round) {
              const int64_t size = round % 7 == 0 ? 0 : round % 50;
              std::vector<Message> messages;
              std::vector<std::pair<Tensor, int>> received;
              for (const int peer : {rank - 1, rank + 1}) {
                if (peer < 0 || peer > 3) continue;
                messages.push_back(Message::send(torch::full({size}, rank * 1000 + round, at::kLong), peer));
                received.emplace_back(torch::zeros({size}, at::kLong), peer);
                messages.push_back(Message::receive(received.back().first, peer));
              }
              own.send_receive(messages).wait();
              for (const auto& [tensor, peer] : received) {
                RANK_REQUIRE(tensor.eq(peer * 1000 + round).all().item<bool>());
              }
            }
          })) == "");
}

TEST_CASE("ranks that split differently are told so", "[collectives][groups]") {
  struct Case {
    std::function<void(Communicator&)> others, odd;
    std::string text;
  };
  const std::vector<Case> cases = {
      {[](Communicator& w) { w.lane("left"); }, [](Communicator& w) { w.lane("right"); }, "lane right"},
      {[](Communicator& w) { w.split(0, 0); }, [](Communicator& w) { w.node(); }, "split node"},
      {[](Communicator& w) { w.split(0, 0); }, [](Communicator& w) { sum_over(w, 1); }, "all_reduce"}};
  for (const Case& one : cases) {
    const auto world = Communicator::in_process(3);
    const auto messages = run_ranks(
        3, [&](int rank) { (rank == 1 ? one.odd : one.others)(*world[static_cast<size_t>(rank)]); });
    for (const std::string& message : messages) {
      CHECK(contains(message, "do not call the same operation"));
      CHECK(contains(message, one.text));
    }
    REQUIRE(first_of(run_ranks(3, [&](int rank) { world[static_cast<size_t>(rank)]->lane("same"); })) == "");
  }
  // Inside of a group ranks have the world's numbers.
  const auto world = Communicator::in_process(4);
  const auto messages = run_ranks(4, [&](int rank) {
    const auto group = world[static_cast<size_t>(rank)]->split(rank / 2, 0, "pairs");
    Tensor x = torch::ones({rank == 3 ? 2 : 1});
    group->all_reduce(x).wait();
  });
  CHECK(messages[0] + messages[1] == "");
  for (const size_t rank : {2, 3}) {
    CHECK(contains(messages[rank], "in pairs: rank 2 calls"));
    CHECK(contains(messages[rank], "rank 3 calls"));
  }
  CHECK(contains(refusal([] { Communicator::alone(at::kCPU)->lane(""); }), "a lane needs a name"));
}

TEST_CASE("a rank that leaves fails its groups, those who wait for them are told why, others go on",
          "[collectives][groups]") {
  // Rank 0 is in a group with 1, that with 2; 3 and 4 are by themselves.
  const auto world = Communicator::in_process(5, CommunicatorOptions().timeout(20s));
  const auto began = std::chrono::steady_clock::now();
  const auto messages = run_ranks(5, [&](int rank) {
    Communicator& own = *world[static_cast<size_t>(rank)];
    const auto first = own.split(rank < 2 ? 0 : -1, 0, "first");
    const auto second = own.split(rank == 1 || rank == 2 ? 0 : -1, 0, "second");
    const auto third = own.split(rank > 2 ? 0 : -1, 0, "third");
    own.barrier();
    if (rank == 0) return own.leave("its disk is full");
    if (rank == 1) sum_over(*first, 1);
    if (rank == 2) sum_over(*second, 1);
    for (int i = 0; i < 100; ++i) RANK_REQUIRE(sum_over(*third, 2) == 4);
  });
  CHECK(std::chrono::steady_clock::now() - began < 10s);
  CHECK(messages[0] + messages[3] + messages[4] == "");
  CHECK(contains(messages[1], "in first failed on rank 1 of 5: rank 0 left: its disk is full"));
  CHECK(contains(messages[2], "in second failed on rank 2 of 5: rank 1 failed in "));
  CHECK(contains(messages[2], "rank 0 left: its disk is full"));
  try {
    world[2]->barrier();
    FAIL("a group failed, but its world goes on");
  } catch (const CommunicationError& error) {
    CHECK(error.suspected_ranks() == std::vector<int>{1});
  }
}

TEST_CASE("a rank whose communicator ended is no trouble for groups without it", "[collectives][groups]") {
  auto world = Communicator::in_process(4, CommunicatorOptions().timeout(20s));
  REQUIRE(first_of(run_ranks(4, [&](int rank) {
            auto own = std::move(world[static_cast<size_t>(rank)]);
            const auto pair = own->split(rank / 2, 0);
            own->barrier();
            own.reset();
            if (rank < 2) return;
            std::this_thread::sleep_for(100ms);
            for (int i = 0; i < 100; ++i) RANK_REQUIRE(sum_over(*pair, 1) == 2);
          })) == "");
}

}  // namespace pacer::testing
