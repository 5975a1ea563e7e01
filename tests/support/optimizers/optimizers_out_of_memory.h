// A step of an optimizer whose n-th allocation fails. What the step has not begun to change is as it was, and
// the step can be taken again; a 1-bit optimizer whose step failed later refuses all others.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "support/catch.h"
#include "support/failing_memory.h"
#include "support/message_of.h"
#include "support/optimizers/hand_fed_optimizer.h"
#include "support/session/small_run.h"

namespace pacer::testing::out_of_memory {

inline std::vector<RegisteredOptimizer> optimizers_where(bool RegisteredOptimizer::*trait) {
  std::vector<RegisteredOptimizer> chosen;
  for (const RegisteredOptimizer& entry : all_optimizers()) {
    if (entry.*trait) chosen.push_back(entry);
  }
  return chosen;
}

constexpr int64_t kSteps = 7;

inline bool refuses(const std::string& message) { return contains(message, "failed half-way"); }

// Of one rank alone after each number of steps.
inline std::vector<NamedTensors> states_of_run(const RegisteredOptimizer& entry, at::Device device) {
  HandFedOptimizer run(entry, Communicator::alone(device));
  std::vector<NamedTensors> states = {run.state()};
  while (run.steps < kSteps) {
    run.step();
    states.push_back(run.state());
  }
  return states;
}

using Outcomes = std::map<std::string, int>;

// Steps `before`, then one whose n-th allocation fails. Returns whether there was one.
inline bool try_step(const RegisteredOptimizer& entry, at::Device device, size_t before, int64_t nth,
                     Shortage shortage, const std::vector<NamedTensors>& expected, Outcomes& outcomes) {
  HandFedOptimizer run(entry, Communicator::alone(device));
  run.step_until(static_cast<int64_t>(before));
  run.set_gradients();
  const Attempt result = attempt(nth, shortage, [&] { run.optimizer->step(); });
  CAPTURE(entry.name, before, nth, static_cast<int>(shortage), result.message);
  CHECK(result.is_typed);
  CHECK((result.failed || !result.reached || shortage == Shortage::once));
  for (const auto& item : run.optimizer->state()) CHECK(item.second != nullptr);
  if (!result.failed) {
    ++run.steps;
  } else if (const std::string message = message_of<Error>([&] { run.state(); }); !message.empty()) {
    CHECK(refuses(message));
    CHECK(refuses(message_of<Error>([&] { run.step(); })));
    ++outcomes["refused"];
    return result.reached;
  } else {
    CHECK(first_difference(run.state(), expected[before]) == "");
    ++outcomes["unchanged"];
  }
  run.step_until(kSteps);
  CHECK(first_difference(run.state(), expected.back()) == "");
  return result.reached;
}

inline Outcomes try_all_allocations(const RegisteredOptimizer& entry, at::Device device, size_t before,
                                    const std::vector<NamedTensors>& expected) {
  Outcomes outcomes;
  for_all_allocations([&](int64_t nth, Shortage shortage) {
    const bool reached = try_step(entry, device, before, nth, shortage, expected, outcomes);
    if (!reached) return false;
    // The first time LibTorch keeps something of the error.
    const int64_t live = live_allocations();
    try_step(entry, device, before, nth, shortage, expected, outcomes);
    const int64_t kept = live_allocations() - live;
    CAPTURE(nth);
    CHECK(kept <= 0);
    return true;
  });
  return outcomes;
}

}  // namespace pacer::testing::out_of_memory
