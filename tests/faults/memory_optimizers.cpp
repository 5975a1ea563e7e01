// Host memory that runs out in a step of an optimizer, at its n-th allocation, for every n.
#include <algorithm>

#include "support/checkpoints/stored_checkpoints.h"
#include "support/heard_warnings.h"
#include "support/message_of.h"
#include "support/optimizers/onebit_ranks.h"
#include "support/optimizers/optimizers_out_of_memory.h"

namespace pacer::testing {
namespace {
namespace memory_optimizers {

using namespace out_of_memory;

// Two ranks as threads, of which one fails.
class TwoRanks {
 public:
  explicit TwoRanks(const RegisteredOptimizer& entry)
      : world_(Communicator::in_process(2, CommunicatorOptions().timeout(std::chrono::seconds(20)))) {
    for (const auto& rank : world_) runs_.push_back(std::make_unique<HandFedOptimizer>(entry, rank));
  }
  HandFedOptimizer& run(int rank) { return *runs_[static_cast<size_t>(rank)]; }

  std::vector<std::string> on_both(const std::function<void(HandFedOptimizer&, int)>& f) {
    return run_ranks(2, [&](int rank) {
      std::string unheard;
      HeardWarnings ear(unheard);
      const c10::WarningUtils::WarningHandlerGuard guard(&ear);
      f(run(rank), rank);
    });
  }
  // As a Session does where a step throws.
  Attempt fail_on(int culprit, int64_t nth, Shortage shortage) {
    Attempt result;
    on_both([&](HandFedOptimizer& run, int rank) {
      run.set_gradients();
      if (rank != culprit) return run.step();
      result = attempt(nth, shortage, [&] { run.optimizer->step(); });
      result.failed ? run.world->leave("it has no memory") : void(++run.steps);
    });
    return result;
  }

 private:
  Ranks world_;
  std::vector<std::unique_ptr<HandFedOptimizer>> runs_;
};

using StatesOfRanks = std::vector<std::vector<NamedTensors>>;  // [steps][rank]

StatesOfRanks states_of_two(const RegisteredOptimizer& entry) {
  TwoRanks ranks(entry);
  StatesOfRanks states;
  while (true) {
    states.push_back({ranks.run(0).state(), ranks.run(1).state()});
    if (states.size() > kSteps) return states;
    REQUIRE(first_of(ranks.on_both([](HandFedOptimizer& run, int) { run.step(); })) == "");
  }
}

bool try_two_ranks(const RegisteredOptimizer& entry, size_t before, int culprit, int64_t nth,
                   Shortage shortage, const StatesOfRanks& expected, Outcomes& outcomes) {
  TwoRanks ranks(entry);
  REQUIRE(first_of(ranks.on_both(
              [&](HandFedOptimizer& run, int) { run.step_until(static_cast<int64_t>(before)); })) == "");
  const Attempt result = ranks.fail_on(culprit, nth, shortage);
  CAPTURE(entry.name, before, culprit, nth, static_cast<int>(shortage), result.message);
  CHECK(result.is_typed);
  if (!result.failed) {
    CHECK(first_of(ranks.on_both([](HandFedOptimizer& run, int) { run.step_until(kSteps); })) == "");
    for (size_t rank : {0, 1})
      CHECK(first_difference(ranks.run(static_cast<int>(rank)).state(), expected.back()[rank]) == "");
    return result.reached;
  }
  for (const int rank : {0, 1}) {
    CAPTURE(rank);
    HandFedOptimizer& run = ranks.run(rank);
    const std::string message = message_of<Error>([&] { run.state(); });
    const auto place = static_cast<size_t>(rank);
    if (!message.empty()) {
      CHECK(refuses(message));
      ++outcomes["refused"];
    } else {  // the culprit never takes the step; the other one may have everything that it needs
      const size_t steps = rank == culprit ? before : static_cast<size_t>(run.steps);
      CHECK(first_difference(run.state(), expected[steps][place]) == "");
      ++outcomes[steps == before ? "unchanged" : "taken"];
    }
  }
  for (const std::string& message : ranks.on_both([](HandFedOptimizer&run, int) { run.step(); }))
    CHECK(message != "");
  return result.reached;
}

}  // namespace memory_optimizers
}  // namespace

TEST_CASE(
    "a step that runs out of host memory is not taken, or refuses every further one, at every allocation",
    "[faults][memory]") {
  using namespace out_of_memory;
  std::string unheard;
  HeardWarnings ear(unheard);
  const c10::WarningUtils::WarningHandlerGuard guard(&ear);
  Turns turns(5);  // one or two of the 6 states of each optimizer, others of the next one
  for (const RegisteredOptimizer& entry : optimizers_where(&RegisteredOptimizer::is_own)) {
    const std::vector<NamedTensors> expected = states_of_run(entry, at::kCPU);
    for (const size_t before : {0, 1, 2, 3, 4, 5}) {  // frozen after two; a refresh after every three
      if (!turns.is_next()) continue;
      CAPTURE(entry.name, before);
      Outcomes outcomes = try_all_allocations(entry, at::kCPU, before, expected);
      CHECK(outcomes["unchanged"] > 0);
      if (!entry.has_ranks) CHECK(outcomes["refused"] == 0);
    }
  }
}

TEST_CASE("a rank that runs out of host memory leaves no other one with a step of its own",
          "[faults][memory][ranks]") {
  using namespace memory_optimizers;
  Turns turns(3);  // one or two of the 4 states of each optimizer, others of the next one
  for (const RegisteredOptimizer& entry : optimizers_where(&RegisteredOptimizer::has_ranks)) {
    const StatesOfRanks expected = states_of_two(entry);
    for (const size_t before : {0, 1, 2, 4}) {
      if (!turns.is_next()) continue;
      Outcomes outcomes;
      for (const int culprit : {0, 1}) {
        const Shortage shortage = culprit == 0 ? Shortage::once : Shortage::from_there_on;
        for (int64_t nth = 1; try_two_ranks(entry, before, culprit, nth, shortage, expected, outcomes);
             nth = next_allocation(nth)) {
        }
      }
      CHECK(outcomes["unchanged"] > 0);
      CHECK((before == 0 || outcomes["refused"] > 0));
    }
  }
}

}  // namespace pacer::testing
