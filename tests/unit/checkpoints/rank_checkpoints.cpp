// Checkpoints of several ranks: resumed runs go on to the bit (R1), what fails on one rank fails on all, and
// a wrong number of ranks is refused.
#include <algorithm>
#include <fstream>

#include <pacer/files/checkpoint_folder.h>

#include "support/catch.h"
#include "support/checkpoints/stored_checkpoints.h"
#include "support/collectives/ranks.h"
#include "support/samples.h"
#include "support/session/small_run.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

using Runs = std::vector<std::unique_ptr<SmallRun>>;

Runs runs_saving_to(const std::string& folder, const RegisteredOptimizer& optimizer, int world_size,
                    int64_t every = 1) {
  std::vector<RegisteredHook> hooks;
  for (const RegisteredHook& hook : all_hooks()) {
    const auto used = {"accumulation", "clipping",      "fp16",   "layer drop",
                       "curriculum",   "learning rate", "sampler"};
    if (std::count(used.begin(), used.end(), hook.name)) hooks.push_back(hook);
  }
  Runs runs;
  for (const auto& world : Communicator::in_process(world_size)) {
    runs.push_back(std::make_unique<SmallRun>(optimizer, hooks, /*dropout=*/0, world, /*own_random=*/false));
    runs.back()->session->use(
        Checkpoints(CheckpointsOptions(folder).every(every).keep(100).synchronous(true)));
  }
  return runs;
}

std::vector<std::string> on_all(Runs& runs, const std::function<void(SmallRun&, int)>& f) {
  return run_ranks(static_cast<int>(runs.size()),
                   [&](int rank) { f(*runs[static_cast<size_t>(rank)], rank); });
}

}  // namespace

TEST_CASE("R1: four ranks resume to the bit, from any step, with every optimizer",
          "[session][resume][ranks]") {
  constexpr int64_t kNever = 1000;  // saving takes as long as some steps
  Turns late(2);
  for (const RegisteredOptimizer& optimizer : all_optimizers()) {
    INFO(optimizer.name);
    // Others than 1-bit optimizers have nothing of a rank's own, and stop once, early and late by turns.
    std::vector<int> stops = {1, 4};
    if (!optimizer.has_ranks && !wants_long_tests()) stops = {late.is_next() ? 4 : 1};
    const TemporaryFolder folder;
    Runs runs = runs_saving_to(folder.path(), optimizer, 4, kNever);
    std::vector<detail::TrainingState> states;
    for (int step = 0; step < 6; ++step) {
      REQUIRE(first_of(on_all(runs, [](SmallRun& run, int) { run.step(); })) == "");
      states.push_back(runs[3]->state());
      if (std::count(stops.begin(), stops.end(), step + 1) == 0) continue;
      REQUIRE(first_of(on_all(runs,
                              [](SmallRun& run, int) { run.parts->find<Checkpoints>()->save_now(); })) == "");
    }
    auto checkpoints = list_checkpoints(folder.path());  // the newest first
    REQUIRE(checkpoints.size() == stops.size());
    for (const int stop : stops) {
      const TemporaryFolder again;
      const std::string saved = checkpoints.back().folder;
      checkpoints.pop_back();
      const std::string name = saved.substr(saved.rfind('/'));
      REQUIRE(std::system(("cp -r " + saved + " " + again.path() + name).c_str()) == 0);
      Runs resumed = runs_saving_to(again.path(), optimizer, 4, kNever);
      {
        const CapturedStderr quiet;
        REQUIRE(first_of(on_all(resumed, [](SmallRun& run, int) {
                  run.session->resume();
                  run.sampler.reset();
                })) == "");
      }
      REQUIRE(resumed[0]->session->progress().step == stop);
      for (int step = stop; step < 6; ++step) {
        REQUIRE(first_of(on_all(resumed, [](SmallRun& run, int) { run.step(); })) == "");
        const auto state = resumed[static_cast<size_t>(step % 4)]->state();
        REQUIRE(first_difference(state.model, states[static_cast<size_t>(step)].model) == "");
        REQUIRE(first_difference(state.optimizer, states[static_cast<size_t>(step)].optimizer) == "");
        REQUIRE(resumed[0]->session->progress().tokens ==
                require_number<int64_t>(states[static_cast<size_t>(step)].session, "progress/tokens"));
      }
    }
  }
}

TEST_CASE("a resumed run has the buckets of the run that was saved", "[session][resume][ranks]") {
  const TemporaryFolder folder;
  Runs runs = runs_saving_to(folder.path(), all_optimizers().front(), 2);
  const auto hook = [](SmallRun& run) { return run.parts->find<DataParallel>(); };
  REQUIRE(first_of(on_all(runs, [](SmallRun& run, int) { run.step(); })) == "");
  const auto order = hook(*runs[0])->bucketer()->order();
  CHECK(order.size() == runs[0]->model->parameters().size());
  Runs resumed = runs_saving_to(folder.path(), all_optimizers().front(), 2);
  const CapturedStderr quiet;
  REQUIRE(first_of(on_all(resumed, [](SmallRun& run, int) { run.session->resume(); })) == "");
  REQUIRE(first_of(on_all(resumed, [](SmallRun& run, int) { run.step(); })) == "");
  CHECK(hook(*resumed[1])->bucketer()->order() == order);
  CHECK(hook(*resumed[1])->bucketer()->buckets() == hook(*runs[0])->bucketer()->buckets());
  // A damaged order is refused.
  auto state = runs[1]->state();
  state.session.at("hook/data_parallel/bucket_order")[0] = 99;
  Runs damaged = runs_saving_to(folder.path() + "/other", all_optimizers().front(), 2);
  REQUIRE(first_of(on_all(damaged, [](SmallRun& run, int) { run.step(); })) == "");
  CHECK(contains(refusal([&] { damaged[1]->load(state); }), "no permutation"));
}

TEST_CASE("a checkpoint that a rank cannot read is refused by all", "[session][resume][ranks]") {
  const RegisteredOptimizer optimizer = all_optimizers().front();
  const TemporaryFolder folder;
  Runs runs = runs_saving_to(folder.path(), optimizer, 2);
  REQUIRE(first_of(on_all(runs, [](SmallRun& run, int) { run.step(); })) == "");
  const auto resume = [](SmallRun& run, int) { run.session->resume(); };

  // Rank 1's own file is damaged: the newest checkpoint does not verify, and there is no other.
  const std::string file =
      list_checkpoints(folder.path()).front().folder + "/session-rank-00001-of-00002.safetensors";
  std::ofstream(file, std::ios::app) << "x";
  Runs two = runs_saving_to(folder.path(), optimizer, 2);
  const CapturedStderr quiet;
  for (const std::string& message : on_all(two, resume)) {
    CHECK(contains(message, "rank 0 could not find a checkpoint"));
    CHECK(contains(message, "session-rank-00001-of-00002.safetensors"));
  }
}

TEST_CASE("a rank that cannot save stops the save of all, and the former checkpoint stays",
          "[session][resume][ranks]") {
  // Saves nothing; throws on one rank, once.
  struct Clumsy : Hook {
    explicit Clumsy(int rank) : rank_(rank) {}
    std::string hook_name() const override { return "clumsy"; }
    Slot slot() const override { return Slot::record; }
    void attach(SessionParts& parts) override { parts_ = &parts; }
    void save(NamedTensors&) const override {
      require(parts_->progress.step != 2 || parts_->world().rank() != rank_, "made up");
    }
    int rank_;
    SessionParts* parts_ = nullptr;
  };
  for (const int clumsy : {0, 2}) {
    const TemporaryFolder folder;
    const auto make = [&] {
      Runs runs = runs_saving_to(folder.path(), all_optimizers().front(), 3);
      for (auto& run : runs) run->session->use(Clumsy(clumsy));
      return runs;
    };
    Runs runs = make();
    REQUIRE(first_of(on_all(runs, [](SmallRun& run, int) { run.step(); })) == "");
    const auto saved = runs[1]->state();
    for (const std::string& message : on_all(runs, [](SmallRun&run, int) { run.step(); })) {
      CHECK(contains(
          message, "rank " + std::to_string(clumsy) + " could not write its part of a checkpoint: made up"));
    }
    runs.clear();
    CHECK(list_checkpoints(folder.path()).size() == 1);
    CHECK(names_in_run(folder.path() + "/.").size() == 1);
    Runs resumed = make();
    const CapturedStderr quiet;
    REQUIRE(first_of(on_all(resumed, [](SmallRun& run, int) { run.session->resume(); })) == "");
    CHECK(first_difference(resumed[1]->state().model, saved.model) == "");
  }
}

TEST_CASE("ranks that save at different steps are told so", "[session][resume][ranks]") {
  const TemporaryFolder folder;
  Runs runs = runs_saving_to(folder.path(), all_optimizers().front(), 2);
  REQUIRE(first_of(on_all(runs, [](SmallRun& run, int) { run.step(); })) == "");
  const auto messages = on_all(runs, [](SmallRun& run, int rank) {
    if (rank == 0) run.parts->find<Checkpoints>()->save_now();
    run.step();
  });
  for (const std::string& message : messages) {
    CHECK(contains(message, "rank 0 saves a checkpoint after step 1, rank 1 takes a step"));
  }
}

TEST_CASE("ranks share the writing of the optimizer's state", "[session][resume][ranks]") {
  constexpr int kRanks = 3;
  const TemporaryFolder folder;
  Runs runs = runs_saving_to(folder.path(), all_optimizers().front(), kRanks);
  REQUIRE(first_of(on_all(runs, [](SmallRun& run, int) { run.step(); })) == "");
  const NamedTensors whole = runs[0]->state().optimizer;
  const std::string saved = list_checkpoints(folder.path()).front().folder;
  const auto name_of = [](int rank) {
    return "optimizer-rank-0000" + std::to_string(rank) + "-of-00003.safetensors";
  };
  NamedTensors together;
  size_t sizes[kRanks] = {}, largest = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    FileReader reader(posix_file_system(), saved + "/" + name_of(rank));
    const NamedTensors share = detail::read_tensors(reader, name_of(rank));
    CHECK(!share.empty());
    for (const auto& item : share) {
      CHECK(together.insert(item).second);
      sizes[rank] += item.second.nbytes();
      largest = std::max(largest, item.second.nbytes());
    }
  }
  CHECK(first_difference(together, whole) == "");
  for (const auto& item : runs[0]->state().model) sizes[0] += item.second.nbytes();
  const auto [least, most] = std::minmax_element(std::begin(sizes), std::end(sizes));
  CHECK(*most - *least <= largest);

  // As older versions wrote it: all of it with rank 0. The other files are left empty here.
  for (int rank = 0; rank < kRanks; ++rank) {
    rewrite_file(saved, name_of(rank),
                 [&](NamedTensors& tensors) { tensors = rank == 0 ? whole : NamedTensors(); });
  }
  Runs resumed = runs_saving_to(folder.path(), all_optimizers().front(), kRanks);
  const CapturedStderr quiet;
  REQUIRE(first_of(on_all(resumed, [](SmallRun& run, int) { run.session->resume(); })) == "");
  CHECK(first_difference(resumed[2]->state().optimizer, whole) == "");
}

TEST_CASE("ranks whose optimizers have other state cannot save together", "[session][resume][ranks]") {
  const TemporaryFolder folder;
  Runs runs = runs_saving_to(folder.path(), all_optimizers().front(), 2);
  REQUIRE(first_of(on_all(runs, [](SmallRun& run, int) { run.step(); })) == "");
  auto& state = runs[1]->optimizer->state();
  state.erase(state.begin());
  for (const std::string& message :
       on_all(runs, [](SmallRun&run, int) { run.parts->find<Checkpoints>()->save_now(); })) {
    CHECK(contains(message, "the optimizer of rank 1 has state of other names, dtypes or shapes"));
  }
  CHECK(names_in_run(folder.path() + "/.").size() == 1);
}

}  // namespace pacer::testing
