// The Checkpoints hook and its folder: old checkpoints that cannot be removed, those of another run, and
// checkpoints that come from another kind of device.
#include <pacer/core/version.h>
#include <pacer/device/detail/random_state.h>
#include <pacer/files/checkpoint_folder.h>

#include "support/catch.h"
#include "support/checkpoints/stored_checkpoints.h"
#include "support/collectives/ranks.h"
#include "support/session/small_run.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

std::unique_ptr<SmallRun> run_saving_to(const std::string& folder, int64_t every = 1, int64_t keep = 1,
                                        const std::shared_ptr<Communicator>& world = nullptr) {
  auto run = std::make_unique<SmallRun>(all_optimizers().front(), std::vector<RegisteredHook>(), 0,
                                        world ? world : Communicator::alone(at::kCPU), world == nullptr);
  run->session->use(Checkpoints(CheckpointsOptions(folder).every(every).keep(keep).synchronous(true)));
  return run;
}

}  // namespace

TEST_CASE("an old checkpoint that cannot be removed is a warning, once, and is tried again",
          "[session][resume][checkpoint]") {
  const TemporaryFolder folder;
  const auto run = run_saving_to(folder.path());
  run->step();
  REQUIRE(make_folder(posix_file_system(), folder.path("step-0000000001/mine")));
  const auto warnings_of_step = [&] {
    const CapturedStderr captured;
    run->step();
    return captured.text();
  };
  CHECK(contains(warnings_of_step(), "step-0000000001"));
  CHECK(warnings_of_step() == "");
  CHECK(stored_steps(folder.path()) == std::vector<int64_t>{3});
  remove_folder(posix_file_system(), folder.path(".step-0000000001.removed/mine"));
  CHECK(warnings_of_step() == "");
  CHECK(names_in_run(folder.path() + ".") == std::vector<std::string>{"step-0000000004"});
}

TEST_CASE("the name of a folder may end in slashes, and be that of the root", "[checkpoint]") {
  for (const char* folder : {"/", "//", "x//"}) CHECK_NOTHROW(Checkpoints(CheckpointsOptions(folder)));
}

TEST_CASE("a run that was not resumed refuses the folder of another run before it trains",
          "[session][resume][checkpoint]") {
  const TemporaryFolder folder;
  {
    const auto older = run_saving_to(folder.path());
    for (int step = 0; step < 3; ++step) older->step();
    older->finish();
  }
  const auto run = run_saving_to(folder.path());
  const auto before = run->state();
  for (const std::string& message :
       {refusal([&] { run->step(); }), refusal([&] { run->parts->find<Checkpoints>()->save_now(); })}) {
    CHECK(contains(message, "step-0000000003"));
    CHECK(contains(message, "session.resume()"));
  }
  CHECK(first_difference(run->state(), before) == "");
  CHECK(stored_steps(folder.path()) == std::vector<int64_t>{3});

  const auto resumed = run_saving_to(folder.path());
  CHECK(resumed->resume() == 3);
  resumed->step();
  CHECK(stored_steps(folder.path()) == std::vector<int64_t>{4});
}

TEST_CASE("ranks refuse the folder of another run alike", "[session][resume][checkpoint][ranks]") {
  const TemporaryFolder folder;
  run_saving_to(folder.path())->step();
  std::vector<std::unique_ptr<SmallRun>> runs;
  for (const auto& world : Communicator::in_process(3)) {
    runs.push_back(run_saving_to(folder.path(), 1, 1, world));
  }
  for (const std::string& message :
       run_ranks(3, [&](int rank) { runs[static_cast<size_t>(rank)]->step(); })) {
    CHECK(contains(message, "session.resume()"));
  }
}

TEST_CASE("what a run saves is not removed in favour of checkpoints of later steps",
          "[session][resume][checkpoint]") {
  const TemporaryFolder folder;
  {
    const auto older = run_saving_to(folder.path(), 1, 9);
    for (int step = 0; step < 3; ++step) older->step();
  }
  // The newest are damaged, but have their sizes.
  for (const char* name : {"step-0000000002", "step-0000000003"}) {
    std::string model = content_of(folder.path(std::string(name) + "/model.safetensors"));
    model.back() ^= 1;
    put_content(folder.path(std::string(name) + "/model.safetensors"), model);
  }
  const auto run = run_saving_to(folder.path(), 1, 1);
  REQUIRE(run->resume() == 1);
  run->parts->find<Checkpoints>()->save_now();
  CHECK(find_newest_checkpoint(folder.path()).checkpoint->step == 1);
  run->step();  // replaces the damaged checkpoint of step 2
  CHECK(stored_steps(folder.path()) == std::vector<int64_t>{3, 2});
  CHECK(find_newest_checkpoint(folder.path()).checkpoint->step == 2);
}

TEST_CASE("a checkpoint of a run on a GPU is resumed on a CPU, and the run says so",
          "[session][resume][checkpoint]") {
  const TemporaryFolder folder;
  const auto source = run_saving_to(folder.path());
  source->step();
  rewrite_file(list_checkpoints(folder.path()).front().folder, "session-rank-00000-of-00001.safetensors",
               [](NamedTensors& session) { session["random/cuda"] = torch::zeros({16}, torch::kByte); });
  const auto run = run_saving_to(folder.path());
  const CapturedStderr captured;
  REQUIRE(run->session->resume() == 1);
  CHECK(contains(captured.text(), "saved on a GPU"));
  CHECK(first_difference(run->state().model, source->state().model) == "");
}

TEST_CASE("what becomes of a GPU's random generator follows from who has one", "[session][resume]") {
  CHECK(detail::note_on_random_state(false, false) == "");
  CHECK(detail::note_on_random_state(true, true) == "");
  CHECK(contains(detail::note_on_random_state(true, false), "saved on a CPU"));
  CHECK(contains(detail::note_on_random_state(false, true), "saved on a GPU"));
}

}  // namespace pacer::testing
