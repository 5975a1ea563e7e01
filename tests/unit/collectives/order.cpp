// Operations under way: the order in which they advance is that of their calls, on every rank, whoever waits
// for which of them and when.
#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/detail/alone_transport.h>
#include <pacer/collectives/detail/in_process_transport.h>
#include <pacer/collectives/detail/operation_queue.h>

#include "support/catch.h"
#include "support/collectives/random_program.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"
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

// A message that takes so long, and keeps its deadline.
class SlowMessage : public detail::TransportWork {
 public:
  SlowMessage(std::chrono::milliseconds takes, std::chrono::milliseconds limit)
      : takes_(takes), limit_(limit) {}
  void wait() override {
    std::this_thread::sleep_for(std::min(takes_, limit_));
    is_over_ = true;
    if (takes_ > limit_) throw detail::TransportTimeout("too slow");
  }
  bool is_done() override { return is_over_; }

 private:
  const std::chrono::milliseconds takes_, limit_;
  bool is_over_ = false;
};

detail::TransportCalls slow_messages(int count, std::chrono::milliseconds takes) {
  detail::TransportCalls calls;
  for (int i = 0; i < count; ++i) {
    calls.calls.emplace_back([takes](detail::Transport&, std::chrono::milliseconds limit) {
      return std::make_unique<SlowMessage>(takes, limit);
    });
  }
  return calls;
}

// Moves nothing, and tells when it is aborted.
class IdleTransport : public detail::Transport {
 public:
  std::string name() const override { return "idle"; }
  at::Device device() const override { return at::kCPU; }
  detail::TransportWorkPtr all_reduce(const Tensor&, Milliseconds) override { return nullptr; }
  detail::TransportWorkPtr reduce_scatter(const Tensor&, const Tensor&, Milliseconds) override {
    return nullptr;
  }
  detail::TransportWorkPtr all_gather(const Tensor&, const Tensor&, Milliseconds) override { return nullptr; }
  detail::TransportWorkPtr all_to_all(const Tensor&, const std::vector<int64_t>&, const Tensor&,
                                      const std::vector<int64_t>&, Milliseconds) override {
    return nullptr;
  }
  detail::TransportWorkPtr broadcast(const Tensor&, int, Milliseconds) override { return nullptr; }
  detail::TransportWorkPtr exchange(const std::vector<Message>&, Milliseconds) override { return nullptr; }
  void abort() noexcept override { aborted_.set_value(); }
  std::shared_future<void> aborted() const { return future_; }

 private:
  std::promise<void> aborted_;
  std::shared_future<void> future_{aborted_.get_future()};
};

}  // namespace

TEST_CASE("F3: the messages of an operation, and those before it, share the deadline of the call",
          "[collectives]") {
  detail::OperationQueue queue(detail::connect_alone(at::kCPU).data);
  SECTION("its own") {
    const int count = GENERATE(2, 3);  // the last message is waited for by the caller
    const auto operation = queue.start(slow_messages(count, 300ms), 500ms);
    CHECK_THROWS_WITH(operation->wait(), "not done after 500 ms");
    CHECK(operation->is_done());
  }
  SECTION("those before it") {
    const auto earlier = queue.start(slow_messages(3, 300ms), 10s);
    const auto operation = queue.start(slow_messages(1, 1ms), 100ms);
    CHECK_FALSE(operation->is_done());
    CHECK_THROWS_WITH(operation->wait(), "not done after 100 ms");
    CHECK(operation->is_done());
    earlier->wait();
  }
}

TEST_CASE("what waits when its communicator ends is never started, and says why", "[collectives]") {
  // Either the operation under way is through before it hears of the end, or the end makes it fail.
  const bool fails = GENERATE(false, true);
  const auto transport = std::make_shared<IdleTransport>();
  auto queue = std::make_unique<detail::OperationQueue>(transport);
  std::promise<void> begun;
  detail::TransportCalls two_messages = slow_messages(1, 0ms);
  two_messages.calls.emplace_back([&, aborted = transport->aborted()](detail::Transport&, auto) {
    begun.set_value();
    aborted.wait();
    if (fails) throw std::runtime_error("cut off");
    return nullptr;
  });
  bool is_started = false;
  const auto under_way = queue->start(std::move(two_messages), 10s);
  const auto waiting = queue->start(detail::TransportCall([&](detail::Transport&, auto) {
                                      is_started = true;
                                      return nullptr;
                                    }),
                                    10s);
  begun.get_future().wait();
  queue.reset();
  if (fails) {
    CHECK_THROWS_WITH(under_way->wait(), "cut off");
  } else {
    under_way->wait();
  }
  CHECK_THROWS_WITH(waiting->wait(), fails ? "cut off" : "the communicator has ended");
  CHECK_FALSE(is_started);
}

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

TEST_CASE("threads that expect other numbers of elements than are sent are told which", "[collectives]") {
  const auto threads = detail::connect_in_process(2);
  const auto messages = run_ranks(2, [&](int rank) {
    const std::vector<int64_t> sent = rank == 0 ? std::vector<int64_t>{1, 2} : std::vector<int64_t>{1, 1};
    const std::vector<int64_t> expected = rank == 0 ? std::vector<int64_t>{1, 1} : std::vector<int64_t>{3, 1};
    const Tensor input = torch::ones({sent[0] + sent[1]}), output = torch::zeros({expected[0] + expected[1]});
    threads[static_cast<size_t>(rank)].data->all_to_all(output, expected, input, sent, 5s)->wait();
  });
  for (const std::string& message : messages) {
    CHECK(message == "rank 0 sends 2 elements to rank 1, which expects 3");
  }
}

TEST_CASE("operations are the same whoever waits for which of them first", "[collectives]") {
  const uint64_t programs = wants_long_tests() ? 1000 : 25;
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
            RANK_REQUIRE(sum.equal(torch::ones({4})));
          })) == "");
}

}  // namespace pacer::testing
