// Host memory that runs out in a Session, at the n-th allocation: while it is made with all kinds of hooks,
// in its step, and while it saves and resumes.
#include <algorithm>
#include <filesystem>
#include <map>

#include "failing_memory.h"
#include "hand_fed_optimizer.h"
#include "support/catch.h"
#include "support/checkpoint_samples.h"
#include "support/onebit_ranks.h"
#include "support/stored_checkpoints.h"

namespace pacer::testing {
namespace {
namespace memory_sessions {

constexpr int64_t kSteps = 4;

int64_t open_descriptors() {
  using std::filesystem::directory_iterator;
  return std::distance(directory_iterator("/proc/self/fd"), directory_iterator());
}

// One of each kind; fp16 of the kinds of precision, because it has a state.
std::vector<RegisteredHook> hooks_of_all_kinds() {
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
std::unique_ptr<SmallRun> new_run(const std::string& folder = "", bool synchronous = false) {
  auto run = std::make_unique<SmallRun>(registered_optimizer("OneBitAdam"), hooks_of_all_kinds(),
                                        /*dropout=*/0, Communicator::alone(at::kCPU), /*own_random=*/false);
  if (!folder.empty()) {
    run->session->use(Checkpoints(CheckpointsOptions(folder).every(1000).keep(9).synchronous(synchronous)));
  }
  return run;
}

// Parameters, optimizer and hooks; not LibTorch's random state, which is everybody's.
detail::TrainingState state_of(SmallRun& run) {
  detail::TrainingState state = run.state();
  state.session.erase("random/cpu");
  return state;
}

std::vector<detail::TrainingState> expected_states() {
  const auto run = new_run();
  std::vector<detail::TrainingState> states = {state_of(*run)};
  while (run->session->progress().step < kSteps) {
    run->step();
    states.push_back(state_of(*run));
  }
  return states;
}

// Everything of the next step but Session::step of its last micro-batch.
void come_to_the_step(SmallRun& run) {
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

// Each n that is chosen, both ways. `trial` returns whether there was an n-th allocation.
void for_all_allocations(const std::function<bool(int64_t nth, Shortage shortage)>& trial) {
  for (const Shortage shortage : {Shortage::once, Shortage::from_there_on}) {
    for (int64_t nth = 1; trial(nth, shortage); nth = next_allocation(nth)) {
    }
  }
}

}  // namespace memory_sessions
}  // namespace

TEST_CASE("a Session that cannot be made for want of memory leaves nothing behind",
          "[faults][memory][session]") {
  using namespace memory_sessions;
  const std::vector<detail::TrainingState> expected = expected_states();
  const Quiet quiet;
  int64_t tried = 0;
  for_all_allocations([&](int64_t nth, Shortage shortage) {
    const auto try_it = [&] {
      std::unique_ptr<SmallRun> run;
      return attempt(nth, shortage, [&] { run = new_run(); });
    };
    const Attempt result = try_it();  // LibTorch keeps something of a first error
    const int64_t live = FailingMemory::live();
    try_it();
    const int64_t kept = FailingMemory::live() - live;
    CAPTURE(nth, static_cast<int>(shortage), result.message);
    CHECK(result.is_typed);
    CHECK(kept <= 0);
    ++tried;
    return result.reached;
  });
  CHECK(tried > 50);
  const auto run = new_run();
  while (run->session->progress().step < kSteps) run->step();
  CHECK(first_difference(state_of(*run), expected.back()) == "");
}

TEST_CASE("a Session's step that runs out of host memory can be taken again, or has been taken, or refuses",
          "[faults][memory][session]") {
  using namespace memory_sessions;
  const std::vector<detail::TrainingState> expected = expected_states();
  const Quiet quiet;
  for (const int64_t before : {0, 1, 3}) {
    std::map<std::string, int> outcomes;
    for_all_allocations([&](int64_t nth, Shortage shortage) {
      const auto run = new_run();
      while (run->session->progress().step < before) run->step();
      come_to_the_step(*run);
      const Attempt result = attempt(nth, shortage, [&] { run->session->step(); });
      CAPTURE(before, nth, static_cast<int>(shortage), result.message);
      CHECK(result.is_typed);
      const bool taken = run->session->progress().step == before + 1;
      CHECK((taken || result.failed));
      const std::string message = taken ? "" : error_text([&] { run->session->step(); });
      if (!message.empty()) {
        CHECK(contains(message, "failed half-way"));
        ++outcomes["refused"];
        return result.reached;
      }
      ++outcomes[!result.failed ? "done" : taken ? "taken" : "again"];
      while (run->session->progress().step < kSteps) run->step();
      detail::TrainingState end = state_of(*run), wanted = expected.back();
      if (result.failed && taken)
        end.session = wanted.session = {};  // hooks behind the one that failed missed it
      CHECK(first_difference(end, wanted) == "");
      return result.reached;
    });
    for (const char* outcome : {"again", "taken"}) CHECK(outcomes[outcome] > 0);
  }
}

TEST_CASE("a save that runs out of host memory changes nothing, and the next one is whole",
          "[faults][memory][checkpoint]") {
  using namespace memory_sessions;
  const Quiet quiet;
  for (const bool synchronous : {false, true}) {
    const TemporaryFolder folder;
    FileSystem& files = posix_file_system();
    const auto run = new_run(folder.path("run"), synchronous);
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
            std::vector<std::string>{"step-0000000001", "step-0000000002"});
      remove_folder(files, second);
      return result.reached;
    });
    CHECK(tried > 50);
    CHECK(open_descriptors() == descriptors);
  }
}

TEST_CASE("a resume that runs out of host memory changes nothing and can be had again",
          "[faults][memory][checkpoint]") {
  using namespace memory_sessions;
  const std::vector<detail::TrainingState> expected = expected_states();
  const Quiet quiet;
  const TemporaryFolder folder;
  {
    const auto run = new_run(folder.path("run"));
    while (run->session->progress().step < 3) run->step();
    run->parts->find<Checkpoints>()->save_now();
    run->finish();
  }
  int64_t tried = 0;
  for_all_allocations([&](int64_t nth, Shortage shortage) {
    ++tried;
    const auto run = new_run(folder.path("run"));
    const detail::TrainingState fresh = state_of(*run);
    const Attempt result = attempt(nth, shortage, [&] { run->session->resume(); });
    CAPTURE(nth, static_cast<int>(shortage), result.message);
    CHECK(result.is_typed);
    if (result.failed) {
      CHECK(first_difference(state_of(*run), fresh) == "");
      CHECK(run->session->resume() == 3);
    }
    run->sampler.reset();
    while (run->session->progress().step < kSteps) run->step();
    CHECK(first_difference(state_of(*run), expected.back()) == "");
    return result.reached;
  });
  CHECK(tried > 50);
}

}  // namespace pacer::testing
