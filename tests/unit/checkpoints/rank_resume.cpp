// A load that fails on one rank changes nothing on any: parameters, optimizer, errors, hooks, progress and
// random state keep their bits on every rank, whichever part of whichever rank's files is at fault.
#include <algorithm>

#include <pacer/files/checkpoint_folder.h>

#include "support/catch.h"
#include "support/checkpoints/stored_checkpoints.h"
#include "support/collectives/ranks.h"
#include "support/session/small_run.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

constexpr int kResumingRanks = 3;

// Has state that it writes in place, and throws in `load` where it is told to.
struct Averages : Hook {
  explicit Averages(bool fails) : fails_(fails) {}
  std::string hook_name() const override { return "zz_averages"; }  // the last of its slot
  Slot slot() const override { return Slot::record; }
  void save(NamedTensors& state) const override { state["average"] = average; }
  void load(const NamedTensors& state) override {
    average.copy_(require_tensor(state, "average"));
    if (std::exchange(fails_, false)) throw InvalidArgument("made up");
  }
  Tensor average = torch::ones({4});
  bool fails_;
};

SmallRuns resuming_runs(const std::string& folder, int failing_rank = -1) {
  std::vector<RegisteredHook> hooks;
  for (const RegisteredHook& hook : all_hooks()) {
    const auto used = {"clipping", "fp16", "learning rate", "sampler"};
    if (std::count(used.begin(), used.end(), hook.name)) hooks.push_back(hook);
  }
  SmallRuns runs;
  for (const auto& world : Communicator::in_process(kResumingRanks)) {
    runs.push_back(std::make_unique<SmallRun>(registered_optimizer("OneBitAdam"), hooks, /*dropout=*/0, world,
                                              /*own_random=*/false));
    runs.back()->session->use(Checkpoints(CheckpointsOptions(folder).every(4).synchronous(true)));
    runs.back()->session->use(DataParallel());  // else it comes with resume, and with it a part of the state
    runs.back()->session->use(Averages(world->rank() == failing_rank));
  }
  return runs;
}

std::string rank_file(const char* kind, int rank) {
  return std::string(kind) + "-rank-0000" + std::to_string(rank) + "-of-0000" +
         std::to_string(kResumingRanks) + ".safetensors";
}

// Resumes all ranks, which must fail with this text in every message, and leave every rank as it was.
void expect_nothing_loaded(SmallRuns& runs, const std::string& text) {
  std::vector<detail::TrainingState> before;
  for (const auto& run : runs) before.push_back(run->state());
  {
    const CapturedStderr quiet;
    for (const std::string& message : on_all_ranks(runs, [](SmallRun&run, int) { run.session->resume(); })) {
      CHECK(contains(message, text));
    }
  }
  for (size_t rank = 0; rank < runs.size(); ++rank) {
    CAPTURE(rank);
    CHECK(first_difference(runs[rank]->state(), before[rank]) == "");
    CHECK(runs[rank]->session->progress().step == 0);
  }
}

}  // namespace

TEST_CASE("what one rank cannot load changes no rank", "[session][resume][checkpoint][ranks]") {
  const TemporaryFolder source;
  SmallRuns saved = resuming_runs(source.path());
  for (const auto& run : saved) run->parts->find<Averages>()->average.fill_(7);
  for (int step = 0; step < 4; ++step) {
    REQUIRE(first_of(on_all_ranks(saved, [](SmallRun& run, int) { run.step(); })) == "");
  }
  const struct {
    const char* name;
    const char* file;  // of the rank; empty for rank 0's, which all read
    std::string text;  // in every rank's message
    std::function<void(NamedTensors&)> edit;
  } kFaults[] = {{"progress is missing", "session", "progress/step",
                  [](NamedTensors& state) { state.erase("progress/step"); }},
                 {"progress is no count", "session", "progress/tokens",
                  [](NamedTensors& state) { state["progress/tokens"] = number_tensor(int64_t{-1}); }},
                 {"the random state has another form", "session", "random state",
                  [](NamedTensors& state) { state["random/cpu"] = torch::zeros({3}, torch::kByte); }},
                 {"a hook refuses its state", "session", "loss_scale",
                  [](NamedTensors& state) { state["hook/precision/loss_scale"] = number_tensor(-1.0); }},
                 {"an error is missing", "errors", "_error", [](NamedTensors& state) {
                    for (auto item = state.begin(); item != state.end(); ++item) {
                      if (contains(item->first, "worker_error")) {
                        state.erase(item);
                        return;
                      }
                    }
                  }}};
  const std::string name = "/step-0000000004";
  for (const auto& fault : kFaults) {
    for (int rank = 0; rank < kResumingRanks; ++rank) {
      CAPTURE(fault.name, rank);
      const TemporaryFolder folder;
      REQUIRE(std::system(("cp -r " + source.path() + name + " " + folder.path() + name).c_str()) == 0);
      rewrite_file(folder.path() + name, rank_file(fault.file, rank), fault.edit);
      SmallRuns runs = resuming_runs(folder.path());
      expect_nothing_loaded(runs, fault.text);
    }
  }
  for (int rank = 0; rank < kResumingRanks; ++rank) {
    CAPTURE(rank);
    SmallRuns runs = resuming_runs(source.path(), rank);
    expect_nothing_loaded(runs, "rank " + std::to_string(rank) + " could not continue");
    // The next try, which fails nowhere, loads all.
    const CapturedStderr quiet;
    REQUIRE(first_of(on_all_ranks(runs, [](SmallRun& run, int) { run.session->resume(); })) == "");
    for (size_t each = 0; each < runs.size(); ++each) {
      CHECK(first_difference(runs[each]->state(), saved[each]->state()) == "");
    }
  }
}

}  // namespace pacer::testing
