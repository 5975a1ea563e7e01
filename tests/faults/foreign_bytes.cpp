// What one rank sends comes through with a bit turned, or is another message than it should be. Numbers that
// ranks compare and headers are checked; payloads have no checksum, so that what they carry is taken as it
// comes.
#include <cstring>
#include <utility>

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include <pacer/collectives/agreement.h>
#include <pacer/collectives/detail/agreement_message.h>
#include <pacer/collectives/detail/in_process_transport.h>
#include <pacer/kernels/onebit.h>
#include <pacer/parallel/detail/stage_messages.h>

#include "distributed/faulty_transport.h"
#include "support/catch.h"
#include "support/checkpoints/stored_checkpoints.h"
#include "support/heard_warnings.h"
#include "support/optimizers/hand_fed_optimizer.h"
#include "support/optimizers/onebit_ranks.h"

namespace pacer::testing {
namespace {
namespace foreign_bytes {

using detail::TransportWorkPtr;
using Alter = std::function<Tensor(const std::string& operation, const Tensor& sent)>;

// Sends what `alter` makes of each tensor.
class AlteringTransport final : public FaultyTransport {
 public:
  AlteringTransport(std::shared_ptr<Transport> real, Alter alter)
      : FaultyTransport(std::move(real), "none", 0, false, nullptr, std::make_shared<int>(0)),
        alter_(std::move(alter)) {}
  TransportWorkPtr all_reduce(const Tensor& tensor, Milliseconds timeout) override {
    tensor.copy_(alter_("all_reduce", tensor));
    return FaultyTransport::all_reduce(tensor, timeout);
  }
  TransportWorkPtr all_gather(const Tensor& output, const Tensor& input, Milliseconds timeout) override {
    return FaultyTransport::all_gather(output, alter_("all_gather", input), timeout);
  }
  TransportWorkPtr all_to_all(const Tensor& output, const std::vector<int64_t>& output_counts,
                              const Tensor& input, const std::vector<int64_t>& input_counts,
                              Milliseconds timeout) override {
    return FaultyTransport::all_to_all(output, output_counts, alter_("all_to_all", input), input_counts,
                                       timeout);
  }
  TransportWorkPtr exchange(const std::vector<Message>& messages, Milliseconds timeout) override {
    std::vector<Message> altered = messages;
    for (Message& message : altered) {
      if (message.is_sent) message.tensor = alter_("send", message.tensor);
    }
    return FaultyTransport::exchange(altered, timeout);
  }

 private:
  const Alter alter_;
};

void wrap(detail::Connection& connection, const Alter& data, const Alter& control) {
  connection.data = std::make_shared<AlteringTransport>(connection.data, data);
  connection.control = std::make_shared<AlteringTransport>(connection.control, control);
  connection.join = [=, join = connection.join](const detail::GroupMembership& membership) {
    detail::Connection group = join(membership);
    if (!membership.members.empty()) wrap(group, data, control);
    return group;
  };
}

const Alter kAsItIs = [](const std::string&, const Tensor& sent) { return sent; };

// Two ranks, of which the first one's messages are altered.
Ranks two_ranks(const Alter& data, const Alter& control = kAsItIs,
                std::chrono::seconds timeout = std::chrono::seconds(20)) {
  Ranks ranks;
  for (detail::Connection& connection : detail::connect_in_process(2)) {
    if (ranks.empty()) wrap(connection, data, control);
    ranks.push_back(
        std::make_shared<Communicator>(std::move(connection), CommunicatorOptions().timeout(timeout)));
  }
  return ranks;
}

Tensor with_bit_turned(const Tensor& sent, int64_t bit) {
  Tensor copy = sent.detach().clone();
  static_cast<uint8_t*>(copy.mutable_data_ptr())[bit / 8] ^= static_cast<uint8_t>(1U << (bit % 8));
  return copy;
}

// Turns a bit of the next message of that operation, once, when told to.
struct OneBit {
  std::string operation;
  int64_t bit = 0;
  bool is_due = false;
  Alter alter() {
    return [this](const std::string& name, const Tensor& sent) {
      if (!is_due || name != operation) return sent;
      is_due = false;
      return with_bit_turned(sent, bit);
    };
  }
};

// Steps of OneBitAdam, of which the fifth has the bit turned; what each rank threw in it.
std::vector<std::string> compressed_step(OneBit& fault, std::vector<NamedTensors>* states = nullptr) {
  Ranks world = two_ranks(fault.alter());
  std::vector<std::unique_ptr<HandFedOptimizer>> runs;
  for (const auto& rank : world)
    runs.push_back(std::make_unique<HandFedOptimizer>(registered_optimizer("OneBitAdam"), rank));
  const auto step_until = [&](int64_t end) {
    return run_ranks(2, [&](int rank) {
      std::string unheard;
      HeardWarnings ear(unheard);
      const c10::WarningUtils::WarningHandlerGuard guard(&ear);
      try {
        runs[static_cast<size_t>(rank)]->step_until(end);
      } catch (const std::exception& error) {
        world[static_cast<size_t>(rank)]->leave("its step failed");
        throw;
      }
    });
  };
  REQUIRE(first_of(step_until(4)) == "");
  fault.is_due = true;
  std::vector<std::string> messages = step_until(5);
  CHECK_FALSE(fault.is_due);
  for (const auto& run : runs) {
    if (states) states->push_back(run->state());
  }
  return messages;
}

bool any_contains(const std::vector<std::string>& messages, const std::string& part) {
  return std::any_of(messages.begin(), messages.end(),
                     [&](const auto& message) { return contains(message, part); });
}

}  // namespace foreign_bytes
}  // namespace

TEST_CASE("every turned bit of the step, call and form of a compressed message is found",
          "[faults][onebit][ranks]") {
  using namespace foreign_bytes;
  constexpr int64_t kStep = 8 * offsetof(kernels::OneBitHeader, step);
  for (const char* operation : {"all_to_all", "all_gather"}) {
    for (int64_t bit = kStep; bit < 8 * static_cast<int64_t>(sizeof(kernels::OneBitHeader)); bit += 5) {
      CAPTURE(operation, bit);
      OneBit fault{operation, bit};
      const auto messages = compressed_step(fault);
      CHECK(any_contains(messages, "rank 0 sent the signs of step"));
      for (const std::string& message : messages) CHECK(message != "");
    }
  }
}

TEST_CASE("a turned sign of a compressed message or bit of a bucket is taken by all ranks alike",
          "[faults][onebit][ranks]") {
  using namespace foreign_bytes;
  for (const char* operation : {"all_to_all", "all_gather"}) {
    CAPTURE(operation);
    OneBit fault{operation, 8 * static_cast<int64_t>(sizeof(kernels::OneBitHeader))};
    std::vector<NamedTensors> states;
    CHECK(first_of(compressed_step(fault, &states)) == "");
    for (const char* name : {"value of encoder.weight", "value of head.weight"})
      CHECK(same_bits(states[0].at(name), states[1].at(name)));
  }
  OneBit fault{"all_reduce", 30, /*is_due=*/true};
  const Ranks ranks = two_ranks(fault.alter());
  std::vector<Tensor> sums = {at::ones({4}), at::ones({4})};
  CHECK(first_of(run_ranks(2, [&](int rank) {
          const auto place = static_cast<size_t>(rank);
          ranks[place]->all_reduce(sums[place]).wait();
        })) == "");
  CHECK(same_bits(sums[0], sums[1]));
  CHECK_FALSE(same_bits(sums[0], at::full({4}, 2.0F)));
}

TEST_CASE("every turned bit of what ranks compare is an error on every rank, before anything is sent",
          "[faults][collectives][ranks]") {
  using namespace foreign_bytes;
  for (int64_t bit = 0; bit < 8 * static_cast<int64_t>(sizeof(detail::CallRecord)); ++bit) {
    CAPTURE(bit);
    OneBit fault{"all_gather", bit, /*is_due=*/true};
    const Ranks ranks = two_ranks(kAsItIs, fault.alter());
    std::vector<Tensor> sums = {at::ones({4}), at::ones({4})};
    for (const std::string& message : run_ranks(2, [&](int rank) {
           const auto place = static_cast<size_t>(rank);
           ranks[place]->all_reduce(sums[place]).wait();
         })) {
      CHECK(contains(message, "do not call the same operation"));
    }
    for (const Tensor& sum : sums) CHECK(same_bits(sum, at::ones({4})));
  }
  // Weight, tokens and wishes are each rank's own.
  constexpr int64_t kFirstOwn = 8 * offsetof(RankStatus, weight),
                    kNext = 8 * offsetof(RankStatus, fingerprint);
  for (int64_t bit = 0; bit < 8 * static_cast<int64_t>(sizeof(RankStatus)); ++bit) {
    if (bit == kFirstOwn) bit = kNext;
    CAPTURE(bit);
    OneBit fault{"all_gather", bit, /*is_due=*/true};
    const Ranks ranks = two_ranks(kAsItIs, fault.alter());
    for (const std::string& message : run_ranks(2, [&](int rank) {
           require_agreement(*ranks[static_cast<size_t>(rank)], 3, {{"lr", "0.1"}});
         })) {
      CHECK((contains(message, "out of step") || contains(message, "arrived otherwise than it was sent")));
    }
  }
}

TEST_CASE("a text whose length arrives damaged is refused or another text, never a crash",
          "[faults][collectives][ranks]") {
  using namespace foreign_bytes;
  for (int64_t bit = 0; bit < 64; ++bit) {
    CAPTURE(bit);
    OneBit fault{"all_gather", bit, /*is_due=*/true};
    const Ranks ranks = two_ranks(kAsItIs, fault.alter());
    const auto messages = run_ranks(2, [&](int rank) {
      Communicator& world = *ranks[static_cast<size_t>(rank)];
      world.exchange("a text of " + std::to_string(rank));
    });
    if (bit >= 30) CHECK(any_contains(messages, "which cannot be"));
  }
}

TEST_CASE("every turned bit of what a stage says of its tensors is refused or another tensor, never a crash",
          "[faults][pipeline][ranks]") {
  using namespace foreign_bytes;
  const Tensor sent = at::ones({2, 3});
  int64_t refused = 0;
  constexpr int64_t kWordsInUse = 1 + 3 + 2;
  for (int64_t bit = 0; bit < 64 * kWordsInUse; ++bit) {
    CAPTURE(bit);
    OneBit fault{"send", bit};
    // Who is told of a larger tensor waits for the rest of it until the deadline.
    Ranks ranks = two_ranks(fault.alter(), kAsItIs, std::chrono::seconds(2));
    const auto messages = run_ranks(2, [&](int rank) {
      // The other rank need not search for one that has ended.
      const auto world = std::exchange(ranks[static_cast<size_t>(rank)], nullptr);
      PipelineSchedule schedule;
      schedule.ranks = 2;
      detail::StageMessages stage(world, schedule);
      world->barrier();
      if (rank == 0) {
        fault.is_due = true;
        stage.send_activations(0, /*kind=*/0, {sent});
        return stage.collect(/*wait=*/false);
      }
      try {
        stage.take_activations(1, /*kind=*/0);
      } catch (const std::exception&) {
        world->leave("its step failed");
        throw;
      }
    });
    refused += messages[1].empty() ? 0 : 1;
  }
  CHECK(refused > 300);
}

}  // namespace pacer::testing
