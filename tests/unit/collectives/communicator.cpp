// The Communicator over threads: results of every operation against values computed by hand, checks, byte
// counts, and what happens when a rank does something else, is late, or leaves.
#include <chrono>
#include <numeric>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <pacer/collectives/communicator.h>
#include <pacer/core/error.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing {
namespace {

using namespace std::chrono_literals;

// Values that no two elements of any two ranks share.
Tensor values_of(int rank, int64_t count, at::ScalarType type = at::kFloat) {
  return torch::arange(count, at::kLong).add(100 * rank).to(type);
}

}  // namespace

TEST_CASE("collectives over threads give what their definitions say", "[collectives]") {
  for (const int world_size : {1, 2, 3, 4, 7}) {
    for (const int64_t n : {1, 5, 1000}) {
      const auto world = Communicator::in_process(world_size);
      const auto check = [&](int rank) {
        Communicator& own = *world[static_cast<size_t>(rank)];
        const int64_t w = world_size;
        Tensor x = values_of(rank, n);
        own.all_reduce(x).wait();
        RANK_REQUIRE(x.equal((torch::arange(n) * w + 100 * (w * (w - 1) / 2)).to(at::kFloat)));

        Tensor part = torch::empty({n});
        own.reduce_scatter(part, values_of(rank, n * w)).wait();
        RANK_REQUIRE(part.equal(
            (torch::arange(rank * n, (rank + 1) * n) * w + 100 * (w * (w - 1) / 2)).to(at::kFloat)));

        Tensor all = torch::empty({n * w}, at::kLong);
        own.all_gather(all, values_of(rank, n, at::kLong)).wait();
        for (int r = 0; r < world_size; ++r)
          RANK_REQUIRE(all.narrow(0, r * n, n).equal(values_of(r, n, at::kLong)));

        Tensor exchanged = torch::empty({n * w}, at::kByte);
        own.all_to_all(exchanged, torch::full({n * w}, rank, at::kByte)).wait();
        for (int r = 0; r < world_size; ++r)
          RANK_REQUIRE(exchanged.narrow(0, r * n, n).eq(r).all().item<bool>());

        // Rank r sends r + k elements to rank k.
        std::vector<int64_t> to(static_cast<size_t>(w)), from(static_cast<size_t>(w));
        for (int r = 0; r < world_size; ++r)
          to[static_cast<size_t>(r)] = from[static_cast<size_t>(r)] = rank + r;
        const int64_t total = std::accumulate(to.begin(), to.end(), int64_t{0});
        Tensor uneven = torch::empty({total});
        own.all_to_all(uneven, from, torch::full({total}, float(rank)), to).wait();
        int64_t offset = 0;
        for (int r = 0; r < world_size; offset += rank + r++) {
          RANK_REQUIRE(uneven.narrow(0, offset, rank + r).eq(float(r)).all().item<bool>());
        }

        Tensor sent = values_of(rank, n);
        own.broadcast(sent, world_size - 1).wait();
        RANK_REQUIRE(sent.equal(values_of(world_size - 1, n)));
        if (world_size > 1) {
          Tensor received = torch::empty({n});
          const int next = (rank + 1) % world_size, former = (rank + world_size - 1) % world_size;
          own.send_receive({Message::send(values_of(rank, n), next), Message::receive(received, former)})
              .wait();
          RANK_REQUIRE(received.equal(values_of(former, n)));
        }
        own.barrier();
        RANK_REQUIRE(own.exchange(std::string(static_cast<size_t>(rank), 'x')).back() ==
                     std::string(static_cast<size_t>(world_size - 1), 'x'));
      };
      REQUIRE(first_of(run_ranks(world_size, check)) == "");
    }
  }
}

TEST_CASE("several tensors are added in one operation, of any dtypes and sizes", "[collectives]") {
  for (const bool ordered : {false, true}) {
    const auto world = Communicator::in_process(3, CommunicatorOptions().ordered_sum(ordered));
    CHECK_FALSE(world[0]->coalesces());
    const auto check = [&](int rank) {
      Communicator& own = *world[static_cast<size_t>(rank)];
      const std::vector<Tensor> tensors = {values_of(rank, 5), values_of(rank, 0),
                                           values_of(rank, 1000, at::kDouble).view({10, 100}),
                                           values_of(rank, 7, at::kLong)};
      own.all_reduce_coalesced(tensors).wait();
      for (const Tensor& tensor : tensors) {
        RANK_REQUIRE(
            tensor.flatten().equal((torch::arange(tensor.numel()) * 3 + 300).to(tensor.scalar_type())));
      }
      RANK_REQUIRE(traffic_of(own, "all_reduce").bytes_sent == 4 * (5 * 4 + 1000 * 8 + 7 * 8) / 3);
      own.all_reduce_coalesced({}).wait();
      own.all_reduce_coalesced({torch::empty({0})}).wait();
      for (const Traffic& entry : own.traffic())
        RANK_REQUIRE((entry.operation != "all_reduce" || entry.calls == 1));
    };
    REQUIRE(first_of(run_ranks(3, check)) == "");
  }
}

TEST_CASE("several tensors travel rounded, each value and each sum once", "[collectives]") {
  const auto world = Communicator::in_process(2);
  std::vector<std::vector<Tensor>> own(2), sums(2);
  for (auto& tensors : own) tensors = {torch::randn({300}), torch::randn({3, 5}), torch::empty({0})};
  REQUIRE(first_of(run_ranks(2, [&](int rank) {
            const auto r = static_cast<size_t>(rank);
            for (const Tensor& tensor : own[r]) sums[r].push_back(tensor.clone());
            world[r]->all_reduce_coalesced(sums[r], at::kBFloat16).wait();
            RANK_REQUIRE(traffic_of(*world[r], "all_reduce").bytes_sent == 2 * (384 + 128));  // padded
          })) == "");
  for (size_t i = 0; i < 3; ++i) {
    const Tensor wanted = own[0][i].to(at::kBFloat16) + own[1][i].to(at::kBFloat16);
    for (const auto& tensors : sums) CHECK(tensors[i].equal(wanted.to(at::kFloat)));
  }
}

TEST_CASE("sums over threads are in rank order", "[collectives]") {
  // 1 + 1e8 - 1e8 is 0 in fp32 from left to right, and 1 in another order.
  const auto world = Communicator::in_process(3);
  const float values[] = {1, 1e8F, -1e8F};
  std::vector<Tensor> sums(3);
  const auto failures = run_ranks(3, [&](int rank) {
    sums[static_cast<size_t>(rank)] = torch::full({4}, values[rank]);
    world[static_cast<size_t>(rank)]->all_reduce(sums[static_cast<size_t>(rank)]).wait();
  });
  REQUIRE(first_of(failures) == "");
  for (const Tensor& sum : sums) REQUIRE(sum.eq(0).all().item<bool>());
}

TEST_CASE("ranks that call different operations are told so before anything is sent", "[collectives]") {
  struct Case {
    std::function<void(Communicator&)> others, odd;
    std::string text;
  };
  const auto all_reduce = [](int64_t n, at::ScalarType type) {
    return [=](Communicator& world) { world.all_reduce(torch::ones({n}, type)).wait(); };
  };
  const auto sums = [](const std::vector<int64_t>& sizes) {
    return [=](Communicator& world) {
      std::vector<Tensor> tensors;
      for (const int64_t size : sizes) tensors.push_back(torch::ones({size}));
      world.all_reduce_coalesced(tensors).wait();
    };
  };
  const std::vector<Case> cases = {
      {all_reduce(7, at::kFloat), all_reduce(8, at::kFloat), "of 8 elements"},
      {all_reduce(7, at::kFloat), all_reduce(7, at::kDouble), "Double"},
      {all_reduce(7, at::kFloat), [](Communicator& w) { w.broadcast(torch::ones({7}), 0).wait(); },
       "broadcast"},
      {[](Communicator& w) { w.broadcast(torch::ones({7}), 0).wait(); },
       [](Communicator& w) { w.broadcast(torch::ones({7}), 1).wait(); }, "from rank 1"},
      {all_reduce(0, at::kFloat), all_reduce(1, at::kFloat), "of 0 elements"},
      {sums({3, 4}), sums({7}), "in 2 tensors"},
      {sums({3, 4}), sums({4, 3}), "dtypes and sizes"},
      {sums({7}), all_reduce(7, at::kFloat), "in 1 tensors"},
  };
  for (const Case& one : cases) {
    for (const int odd : {0, 2}) {
      const auto world = Communicator::in_process(3);
      const auto messages = run_ranks(
          3, [&](int rank) { (rank == odd ? one.odd : one.others)(*world[static_cast<size_t>(rank)]); });
      for (const std::string& message : messages) {
        CHECK(contains(message, "do not call the same operation"));
        CHECK(contains(message, one.text));
      }
      // Nothing is broken: they can go on.
      REQUIRE(first_of(run_ranks(3, [&](int rank) { world[static_cast<size_t>(rank)]->barrier(); })) == "");
    }
  }
}

TEST_CASE("a communicator refuses tensors that do not fit, and says why", "[collectives]") {
  const auto world = Communicator::in_process(2);
  Communicator& own = *world[0];
  const Tensor matrix = torch::ones({4, 4});
  CHECK(contains(refusal([&] { own.all_reduce(Tensor()).wait(); }), "undefined"));
  CHECK(contains(refusal([&] { own.all_reduce(matrix.t()).wait(); }), "contiguous"));
  CHECK(contains(refusal([&] { own.all_reduce_coalesced({matrix, matrix.t()}).wait(); }), "contiguous"));
  CHECK(contains(refusal([&] { own.all_reduce_coalesced({Tensor()}, at::kBFloat16).wait(); }), "undefined"));
  CHECK(contains(refusal([&] { own.all_gather(torch::ones({5}), torch::ones({2})).wait(); }), "2 times"));
  CHECK(contains(refusal([&] { own.reduce_scatter(torch::ones({2}), torch::ones({5})).wait(); }), "2 times"));
  CHECK(
      contains(refusal([&] { own.all_to_all(torch::ones({3}), torch::ones({3})).wait(); }), "equal chunks"));
  CHECK(contains(refusal([&] {
                   own.all_to_all(torch::ones({3}), {1, 1}, torch::ones({3}), {1, 2}).wait();
                 }),
                 "counts"));
  CHECK(contains(refusal([&] { own.broadcast(matrix, 2).wait(); }), "rank 2 does not exist"));
  CHECK(contains(refusal([&] { own.send(matrix, 0).wait(); }), "no peer 0"));
  CHECK(contains(refusal([&] { Communicator::in_process(0); }), "at least 1"));
  CHECK(
      contains(refusal([&] { Communicator::in_process(2, CommunicatorOptions().timeout(0ms)); }), "timeout"));
}

TEST_CASE("bytes are counted by operation and phase", "[collectives]") {
  const auto world = Communicator::in_process(4, CommunicatorOptions().check_calls(false));
  const auto failures = run_ranks(4, [&](int rank) {
    Communicator& own = *world[static_cast<size_t>(rank)];
    Tensor x = torch::ones({1000}), all = torch::ones({4000}), chunk = torch::ones({250});
    own.all_reduce(x).wait();
    own.set_phase("compressed");
    own.all_reduce(x).wait();
    own.all_gather(all, x).wait();
    own.reduce_scatter(chunk, x).wait();
    own.all_to_all(torch::ones({1000}), x).wait();
    own.broadcast(x, 1).wait();
  });
  REQUIRE(first_of(failures) == "");
  const auto traffic = world[0]->traffic();
  REQUIRE(traffic.size() == 6);
  CHECK((traffic[0].phase == "" && traffic[0].operation == "all_reduce" && traffic[0].bytes_sent == 6000));
  CHECK((traffic[1].phase == "compressed" && traffic[1].bytes_sent == 6000 && traffic[1].calls == 1));
  CHECK(traffic_of(*world[0], "all_gather").bytes_sent == 12000);
  CHECK(traffic_of(*world[0], "reduce_scatter").bytes_sent == 3000);
  CHECK(traffic_of(*world[0], "all_to_all").bytes_sent == 3000);
  CHECK(traffic_of(*world[0], "broadcast").calls == 1);
  CHECK(traffic_of(*world[0], "broadcast").bytes_sent == 0);
  CHECK(traffic_of(*world[1], "broadcast").bytes_sent == 4000);
  CHECK(world[0]->bytes_sent() == 6000 + 6000 + 12000 + 3000 + 3000);
}

TEST_CASE("F3: a rank that comes too late fails the others at the deadline of the call", "[collectives]") {
  for (const bool own_deadline : {false, true}) {
    const auto options = CommunicatorOptions().timeout(own_deadline ? 60s : 300ms).check_calls(false);
    const auto world = Communicator::in_process(3, options);
    world[0]->set_step(12);
    const auto began = std::chrono::steady_clock::now();
    const auto messages = run_ranks(3, [&](int rank) {
      if (rank == 2) return;
      CollectiveOptions call;
      if (own_deadline) call.timeout(300ms);
      world[static_cast<size_t>(rank)]->all_reduce(torch::ones({3}), call).wait();
    });
    const auto took = std::chrono::steady_clock::now() - began;
    CHECK(took >= 300ms);
    CHECK(took < 3s);
    CHECK(contains(messages[0], "all_reduce number 1 (step 12) failed on rank 0 of 3"));
    CHECK(contains(messages[0], "rank 2"));
    // Afterwards everything fails at once, with the same words.
    CHECK(run_ranks(1, [&](int) { world[0]->barrier(); })[0] == messages[0]);
    CHECK(world[0]->has_failed());
  }
}

TEST_CASE("a rank that leaves is named, with its reason, by all others", "[collectives]") {
  const auto world = Communicator::in_process(4);
  const auto messages = run_ranks(4, [&](int rank) {
    if (rank == 1) {
      std::this_thread::sleep_for(50ms);
      world[1]->leave("its data ended");
      world[1]->barrier();
    }
    world[static_cast<size_t>(rank)]->all_reduce(torch::ones({3})).wait();
  });
  for (const int rank : {0, 2, 3}) {
    CHECK(contains(messages[static_cast<size_t>(rank)], "rank 1 left: its data ended"));
  }
  CHECK(contains(messages[1], "rank 1 has left"));
  try {
    world[0]->check();
    FAIL("the failure is forgotten");
  } catch (const CommunicationError& error) {
    CHECK(error.suspected_ranks() == std::vector<int>{1});
    CHECK(error.operation() == "agreement");
  }
}

}  // namespace pacer::testing
