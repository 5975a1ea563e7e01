// A Session whose n-th allocation fails: while it is made with all kinds of hooks, in its step, and while it
// saves and resumes. `at_least` is how many allocations must have been tried.
#pragma once

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "support/catch.h"
#include "support/checkpoints/checkpoint_samples.h"
#include "support/checkpoints/stored_checkpoints.h"
#include "support/failing_memory.h"
#include "support/heard_warnings.h"
#include "support/message_of.h"
#include "support/optimizers/onebit_ranks.h"
#include "support/optimizers/optimizers_out_of_memory.h"

namespace pacer::testing::out_of_memory {

constexpr int64_t kSessionSteps = 4;

inline int64_t open_descriptors() {
  using std::filesystem::directory_iterator;
  return std::distance(directory_iterator("/proc/self/fd"), directory_iterator());
}

// One of each kind; fp16 of the kinds of precision, because it has a state.
inline std::vector<RegisteredHook> hooks_of_all_kinds() {
  std::vector<RegisteredHook> chosen;
  for (const RegisteredHook& hook : all_hooks()) {
    const bool is_new = std::none_of(chosen.begin(), chosen.end(),
                                     [&](const RegisteredHook& other) { return other.kind == hook.kind; });
    const bool is_wanted = hook.kind != "layers" && (hook.kind != "precision" || hook.name == "fp16");
    if (is_new && is_wanted) chosen.push_back(hook);
  }
  return chosen;
}

// Draws nothing at random, so that it has no random state of its own.
inline std::unique_ptr<SmallRun> new_run(at::Device device, const std::string& folder = "",
                                         bool synchronous = false) {
  auto run = std::make_unique<SmallRun>(registered_optimizer("OneBitAdam"), hooks_of_all_kinds(),
                                        /*dropout=*/0, Communicator::alone(device), /*own_random=*/false);
  if (!folder.empty()) {
    run->session->use(Checkpoints(CheckpointsOptions(folder).every(1000).keep(9).synchronous(synchronous)));
  }
  return run;
}

// Parameters, optimizer and hooks; not LibTorch's random state, which is everybody's.
inline detail::TrainingState state_of(SmallRun& run) {
  detail::TrainingState state = run.state();
  for (const char* name : {"random/cpu", "random/cuda"}) state.session.erase(name);
  return state;
}

inline std::vector<detail::TrainingState> expected_session_states(at::Device device) {
  const auto run = new_run(device);
  std::vector<detail::TrainingState> states = {state_of(*run)};
  while (run->session->progress().step < kSessionSteps) {
    run->step();
    states.push_back(state_of(*run));
  }
  return states;
}

// Everything of the next step but Session::step of its last micro-batch.
inline void come_to_the_step(SmallRun& run) {
  while (true) {
    const auto batch = run.next_batch();
    auto [x, y] = run.session->begin(batch.first, batch.second);
    run.session->backward(run.model->loss(x, y));
    const Progress& progress = run.session->progress();
    if (progress.micro_step + 1 == progress.micro_steps) return;
    run.session->step();
  }
}

class Quiet {
 public:
  Quiet() : ear_(unheard_), guard_(&ear_) {}

 private:
  std::string unheard_;
  HeardWarnings ear_;
  c10::WarningUtils::WarningHandlerGuard guard_;
  CapturedStderr stderr_;
};

// Making one leaves nothing behind, and the next one trains as always.
inline void try_making_sessions(at::Device device, int64_t at_least) {
  const std::vector<detail::TrainingState> expected = expected_session_states(device);
  const Quiet quiet;
  int64_t tried = 0;
  for_all_allocations([&](int64_t nth, Shortage shortage) {
    const auto try_it = [&] {
      std::unique_ptr<SmallRun> run;
      return attempt(nth, shortage, [&] { run = new_run(device); });
    };
    const Attempt result = try_it();  // LibTorch keeps something of a first error
    const int64_t live = live_allocations();
    try_it();
    const int64_t kept = live_allocations() - live;
    CAPTURE(nth, static_cast<int>(shortage), result.message);
    CHECK(result.is_typed);
    CHECK(kept <= 0);
    ++tried;
    return result.reached;
  });
  CHECK(tried >= at_least);
  const auto run = new_run(device);
  while (run->session->progress().step < kSessionSteps) run->step();
  CHECK(first_difference(state_of(*run), expected.back()) == "");
}

// Its step can be taken again, or has been taken, or it refuses all others: how often each was so, for the
// first step and two later ones.
inline std::vector<Outcomes> try_session_steps(at::Device device) {
  const std::vector<detail::TrainingState> expected = expected_session_states(device);
  const Quiet quiet;
  std::vector<Outcomes> all;
  for (const int64_t before : {0, 1, 3}) {
    Outcomes& outcomes = all.emplace_back();
    for_all_allocations([&](int64_t nth, Shortage shortage) {
      const auto run = new_run(device);
      while (run->session->progress().step < before) run->step();
      come_to_the_step(*run);
      const Attempt result = attempt(nth, shortage, [&] { run->session->step(); });
      CAPTURE(before, nth, static_cast<int>(shortage), result.message);
      CHECK(result.is_typed);
      const bool taken = run->session->progress().step == before + 1;
      CHECK((taken || result.failed));
      const std::string message = taken ? "" : message_of<Error>([&] { run->session->step(); });
      if (!message.empty()) {
        CHECK(contains(message, "failed half-way"));
        ++outcomes["refused"];
        return result.reached;
      }
      ++outcomes[!result.failed ? "done" : taken ? "taken" : "again"];
      while (run->session->progress().step < kSessionSteps) run->step();
      detail::TrainingState end = state_of(*run), wanted = expected.back();
      if (result.failed && taken)
        end.session = wanted.session = {};  // hooks behind the one that failed missed it
      CHECK(first_difference(end, wanted) == "");
      return result.reached;
    });
  }
  return all;
}

// A save changes nothing, and the next one is whole.
inline void try_saves(at::Device device, int64_t at_least) {
  const Quiet quiet;
  for (const bool synchronous : {false, true}) {
    const TemporaryFolder folder;
    FileSystem& files = posix_file_system();
    const auto run = new_run(device, folder.path("run"), synchronous);
    run->step();
    const std::string first = run->parts->find<Checkpoints>()->save_now();
    const FileContents former = loaded_contents(files, first);
    run->step();
    const detail::TrainingState state = state_of(*run);
    const int64_t descriptors = open_descriptors();
    int64_t tried = 0;
    for_all_allocations([&](int64_t nth, Shortage shortage) {
      ++tried;
      const Attempt result = attempt(nth, shortage, [&] { run->parts->find<Checkpoints>()->save_now(); });
      CAPTURE(synchronous, nth, static_cast<int>(shortage), result.message);
      CHECK(result.is_typed);
      CHECK(first_difference(state_of(*run), state) == "");
      CHECK(loaded_contents(files, first) == former);
      const std::string second = run->parts->find<Checkpoints>()->save_now();
      CHECK(list_folder(files, folder.path("run")) ==
            std::vector<std::string>{".checkpoints.lock", "step-0000000001", "step-0000000002"});
      remove_folder(files, second);
      return result.reached;
    });
    CHECK(tried >= at_least);
    CHECK(open_descriptors() == descriptors);
  }
}

// A resume changes nothing, and can be had again.
inline void try_resumes(at::Device device, int64_t at_least) {
  const std::vector<detail::TrainingState> expected = expected_session_states(device);
  const Quiet quiet;
  const TemporaryFolder folder;
  {
    const auto run = new_run(device, folder.path("run"));
    while (run->session->progress().step < 3) run->step();
    run->parts->find<Checkpoints>()->save_now();
    run->finish();
  }
  int64_t tried = 0;
  for_all_allocations([&](int64_t nth, Shortage shortage) {
    ++tried;
    const auto run = new_run(device, folder.path("run"));
    const detail::TrainingState fresh = state_of(*run);
    const Attempt result = attempt(nth, shortage, [&] { run->session->resume(); });
    CAPTURE(nth, static_cast<int>(shortage), result.message);
    CHECK(result.is_typed);
    if (result.failed) {
      CHECK(first_difference(state_of(*run), fresh) == "");
      CHECK(run->session->resume() == 3);
    }
    run->sampler.reset();
    while (run->session->progress().step < kSessionSteps) run->step();
    CHECK(first_difference(state_of(*run), expected.back()) == "");
    return result.reached;
  });
  CHECK(tried >= at_least);
}

}  // namespace pacer::testing::out_of_memory
