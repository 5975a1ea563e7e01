// Runs that go on from another checkpoint than the newest.
#include <optional>
#include <utility>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <pacer/files/checkpoint_folder.h>

#include "support/catch.h"
#include "support/checkpoints/stored_checkpoints.h"
#include "support/session/two_layers.h"
#include "support/temporary_folder.h"

namespace pacer::testing::resume_step {
namespace {

std::unique_ptr<SmallRun> run_saving_to(const std::string& folder) {
  auto run = std::make_unique<SmallRun>(all_optimizers().front(), std::vector<RegisteredHook>(),
                                        /*dropout=*/0, Communicator::alone(at::kCPU), /*own_random=*/false);
  run->session->use(Checkpoints(CheckpointsOptions(folder).keep(10).every(1).synchronous(true)));
  return run;
}

std::string refusal_of_step(SmallRun& run, int64_t step) {
  return refusal([&] { run.session->resume(ResumeOptions().step(step)); });
}

std::string folder_of(const std::string& root, int64_t step) {
  return root + "/step-000000000" + std::to_string(step);
}

void damage(const std::string& folder) {
  REQUIRE(std::system(("printf x >> " + folder + "/model.safetensors").c_str()) == 0);
}

}  // namespace

TEST_CASE("a run goes on from the step that it is told, and replaces what was ahead",
          "[session][resume][checkpoint]") {
  const TemporaryFolder folder;
  std::vector<detail::TrainingState> states;
  {
    const auto whole = run_saving_to(folder.path());
    for (int step = 0; step < 6; ++step) {
      whole->step();
      states.push_back(whole->state());
    }
    whole->finish();
  }
  damage(folder_of(folder.path(), 5));
  const auto resumed = run_saving_to(folder.path());
  {
    const CapturedStderr said;
    CHECK(resumed->session->saved_steps() == std::vector<int64_t>{6, 4, 3, 2, 1});
    CHECK(contains(said.text(), "step-0000000005"));
  }
  const auto before = resumed->state();
  const std::string message = refusal_of_step(*resumed, 7);
  CHECK(contains(message, "no checkpoint of step 7"));
  CHECK(contains(message, "1, 2, 3, 4, 5, 6"));
  CHECK(contains(refusal_of_step(*resumed, 5), "step-0000000005"));
  CHECK(first_difference(resumed->state(), before) == "");

  {
    const CapturedStderr quiet;
    REQUIRE(resumed->session->resume(ResumeOptions().step(3)) == 3);
  }
  CHECK(first_difference(resumed->state(), states[2]) == "");
  CHECK(stored_steps(folder.path()) == std::vector<int64_t>{6, 5, 4, 3, 2, 1});
  for (int step = 3; step < 6; ++step) {
    resumed->step();
    CHECK(first_difference(resumed->state(), states[static_cast<size_t>(step)]) == "");
  }
  CHECK_NOTHROW(verify_checkpoint(folder_of(folder.path(), 5)));
  CHECK(contains(refusal([&] { (void)resumed->session->saved_steps(); }), "before the first begin"));
}

TEST_CASE("a checkpoint in the folder of another step is neither named nor taken",
          "[session][resume][checkpoint]") {
  const TemporaryFolder folder;
  std::optional<detail::TrainingState> second;
  {
    const auto run = run_saving_to(folder.path());
    for (int step = 0; step < 3; ++step) {
      run->step();
      if (step == 1) second = run->state();
    }
    run->finish();
  }
  REQUIRE(std::rename(folder_of(folder.path(), 3).c_str(), folder_of(folder.path(), 9).c_str()) == 0);
  const auto resumed = run_saving_to(folder.path());
  const auto before = resumed->state();
  const std::string message = refusal_of_step(*resumed, 9);
  for (const char* part :
       {"step-0000000009/manifest.json is of step 3", "that of step 9", "give the folder"}) {
    CHECK(contains(message, part));
  }
  CHECK(first_difference(resumed->state(), before) == "");
  const auto names_it = [](const std::string& said) {
    return contains(said, "passed over the checkpoint ") && contains(said, "/manifest.json is of step 3");
  };
  {
    const CapturedStderr said;
    CHECK(resumed->session->saved_steps() == std::vector<int64_t>{2, 1});
    CHECK(names_it(said.text()));
  }
  const CapturedStderr said;
  CHECK(resumed->session->resume() == 2);
  CHECK(names_it(said.text()));
  CHECK(first_difference(resumed->state(), *second) == "");
}

TEST_CASE("saved_steps needs Checkpoints", "[session][resume][errors]") {
  auto model = two_layers();
  FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(0.01));
  Session without(model, optimizer);
  CHECK(contains(refusal([&] { without.saved_steps(); }), "Checkpoints"));
}

}  // namespace pacer::testing::resume_step
