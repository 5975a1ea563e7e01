// Checkpoints that are written beside training: what is saved is the state of its step, errors come out at
// the next save or at the end on every rank alike, and signals end a run in good order.
#include <algorithm>
#include <csignal>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

#include <pacer/checkpoints/detail/checkpoint_save.h>
#include <pacer/checkpoints/detail/host_snapshot.h>
#include <pacer/checkpoints/detail/stop_signals.h>
#include <pacer/files/checkpoint_folder.h>

#include "support/catch.h"
#include "support/checkpoints/stored_checkpoints.h"
#include "support/collectives/ranks.h"
#include "support/session/small_run.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

// A model's file that cannot be written from now on: nobody stores complex numbers of twice 64 bits.
void spoil(SmallRun& run) {
  run.model->named_buffers()["phases"].set_data(torch::zeros({2}, torch::kComplexDouble));
}

// With `broken`, spoil() may follow.
SmallRuns runs_with(const CheckpointsOptions& options, int world_size, bool broken = false) {
  SmallRuns runs;
  for (const auto& world : Communicator::in_process(world_size)) {
    runs.push_back(std::make_unique<SmallRun>(registered_optimizer("OneBitAdam"),
                                              std::vector<RegisteredHook>(), 0, world, /*own_random=*/false));
    if (broken) runs.back()->model->register_buffer("phases", torch::zeros({2}));
    runs.back()->session->use(Checkpoints(options));
  }
  return runs;
}

detail::SaveJob job_in(const std::string& root, int rank, int64_t world_size) {
  detail::SaveJob job;
  job.step = 7;
  job.rank = rank;
  job.root = root;
  job.facts.world_size = world_size;
  job.timeout = std::chrono::minutes(1);
  job.staging = root + "/.step-0000000007.partial";
  if (rank == 0) job.writer = std::make_unique<CheckpointWriter>(posix_file_system(), root, job.step);
  return job;
}

detail::TensorsByFile one_file(const std::string& name) { return {{name, {{"x", torch::ones({3})}}}}; }

}  // namespace

TEST_CASE("a checkpoint written beside training holds the state of its step",
          "[session][resume][checkpoint]") {
  for (const bool synchronous : {false, true}) {
    CAPTURE(synchronous);
    const TemporaryFolder folder;
    const auto options = CheckpointsOptions(folder.path()).every(2).keep(9).synchronous(synchronous);
    SmallRuns runs = runs_with(options, 2);
    std::vector<detail::TrainingState> states;
    for (int step = 0; step < 7; ++step) {
      REQUIRE(first_of(on_all_ranks(runs, [](SmallRun& run, int) { run.step(); })) == "");
      states.push_back(runs[1]->state());
    }
    REQUIRE(first_of(on_all_ranks(runs, [](SmallRun& run, int) { run.finish(); })) == "");
    CHECK(stored_steps(folder.path()) == std::vector<int64_t>{7, 6, 4, 2});
    CHECK(names_in_run(folder.path() + ".").size() == 4);
    while (!list_checkpoints(folder.path()).empty()) {
      const CheckpointInfo newest = list_checkpoints(folder.path()).front();
      CHECK(list_folder(posix_file_system(), newest.folder).size() ==
            open_checkpoint(newest.folder).files.size() + 1);
      SmallRuns resumed = runs_with(options, 2);
      {
        const CapturedStderr quiet;
        REQUIRE(first_of(on_all_ranks(resumed, [](SmallRun& run, int) { run.session->resume(); })) == "");
      }
      CHECK(first_difference(resumed[1]->state(), states[static_cast<size_t>(newest.step - 1)]) == "");
      remove_folder(posix_file_system(), newest.folder);
    }
  }
}

TEST_CASE("what goes wrong beside training is thrown by the next save and by finish, on every rank",
          "[session][resume][checkpoint][ranks]") {
  for (const bool at_finish : {false, true}) {
    CAPTURE(at_finish);
    const TemporaryFolder folder;
    SmallRuns runs = runs_with(CheckpointsOptions(folder.path()).every(2), 3, /*broken=*/true);
    REQUIRE(first_of(on_all_ranks(runs, [](SmallRun& run, int) { run.step(); })) == "");
    for (auto& run : runs) spoil(*run);
    REQUIRE(first_of(on_all_ranks(runs, [](SmallRun& run, int) { run.step(); })) == "");
    const auto messages = on_all_ranks(runs, [&](SmallRun& run, int) {
      if (at_finish) return run.finish();
      run.step();
      run.step();
    });
    for (const std::string& message : messages) {
      CHECK(contains(message, "rank 0 could not write its part of a checkpoint"));
      CHECK(contains(message, "phases"));
    }
    CHECK(stored_steps(folder.path()).empty());
    runs.clear();
    CHECK(names_in_run(folder.path() + ".").empty());
  }
}

TEST_CASE("with synchronous saves the save itself throws", "[session][resume][checkpoint][ranks]") {
  const TemporaryFolder folder;
  SmallRuns runs =
      runs_with(CheckpointsOptions(folder.path()).every(2).synchronous(true), 2, /*broken=*/true);
  REQUIRE(first_of(on_all_ranks(runs, [](SmallRun& run, int) { run.step(); })) == "");
  for (auto& run : runs) spoil(*run);
  for (const std::string& message : on_all_ranks(runs, [](SmallRun&run, int) { run.step(); })) {
    CHECK(contains(message, "phases"));
  }
}

TEST_CASE("a Session that ends without finish completes the checkpoint that is being written",
          "[session][resume][checkpoint][ranks]") {
  const TemporaryFolder folder;
  SmallRuns runs = runs_with(CheckpointsOptions(folder.path()).every(2), 2);
  for (int step = 0; step < 2; ++step) {
    REQUIRE(first_of(on_all_ranks(runs, [](SmallRun& run, int) { run.step(); })) == "");
  }
  runs.clear();
  CHECK(find_newest_checkpoint(folder.path()).checkpoint->step == 2);
}

TEST_CASE("save_now returns when the checkpoint is complete", "[session][resume][checkpoint]") {
  const TemporaryFolder folder;
  SmallRuns runs = runs_with(CheckpointsOptions(folder.path()), 2);
  REQUIRE(first_of(on_all_ranks(runs, [](SmallRun& run, int) { run.step(); })) == "");
  std::vector<std::string> folders(2);
  REQUIRE(first_of(on_all_ranks(runs, [&](SmallRun& run, int rank) {
            folders[static_cast<size_t>(rank)] = run.parts->find<Checkpoints>()->save_now();
          })) == "");
  CHECK(folders == std::vector<std::string>(2, folder.path("step-0000000001")));
  CHECK(verify_checkpoint(folders[0]).files.size() == 5);
}

TEST_CASE("rank 0 completes a checkpoint from records, and names the rank whose record says otherwise",
          "[session][checkpoint]") {
  const TemporaryFolder folder;
  SECTION("all have written") {
    detail::CheckpointSave first(job_in(folder.path("root"), 0, 2));
    detail::CheckpointSave second(job_in(folder.path("root"), 1, 2));
    first.write_in_thread(one_file("a"));
    second.write_in_thread(one_file("b"));
    first.wait_until_written();
    second.wait_until_written();
    CHECK(first.wait() == folder.path("root/step-0000000007"));
    CHECK(second.wait() == "");
    CHECK(open_checkpoint(folder.path("root/step-0000000007")).files.size() == 2);
  }
  SECTION("one failed") {
    detail::CheckpointSave first(job_in(folder.path("root"), 0, 2));
    detail::CheckpointSave second(job_in(folder.path("root"), 1, 2));
    first.write_in_thread(one_file("a"));
    second.write_in_thread({{"b", {{"phases", torch::zeros({2}, torch::kComplexDouble)}}}});
    CHECK(contains(refusal([&] { second.wait_until_written(); }), "phases"));
    const std::string message = refusal([&] { first.wait(); });
    CHECK(contains(message, "rank 1"));
    CHECK(contains(message, "phases"));
  }
  SECTION("one never does") {
    detail::SaveJob job = job_in(folder.path("root"), 0, 2);
    job.timeout = std::chrono::milliseconds(50);
    detail::CheckpointSave first(std::move(job));
    first.write_in_thread(one_file("a"));
    CHECK(contains(refusal([&] { first.wait(); }), "rank 1 has not written its part"));
  }
  SECTION("nobody waits after a failure") {
    const auto start = std::chrono::steady_clock::now();
    {
      detail::CheckpointSave first(job_in(folder.path("root"), 0, 2));
      first.write_in_thread(one_file("a"));
      first.give_up();
    }
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(30));
    CHECK(list_checkpoints(folder.path("root")).empty());
  }
}

TEST_CASE("a snapshot keeps its values and its memory", "[session][checkpoint]") {
  detail::HostSnapshot snapshot;
  Tensor a = torch::ones({3, 2}), b = torch::arange(6).view({2, 3}).t();
  const auto taken = [&](const NamedTensors& model) { return snapshot.take({{"model", model}})[0].second; };
  const NamedTensors first = taken({{"a", a}, {"b", b}, {"empty", torch::empty({0, 2})}});
  const void* memory = first.at("a").const_data_ptr();
  CHECK(same_bits(first.at("b"), b.contiguous()));
  CHECK(first.at("b").is_contiguous());
  a.add_(1);
  CHECK(first.at("a").eq(1).all().item<bool>());
  CHECK(first.at("empty").sizes() == at::IntArrayRef({0, 2}));
  const NamedTensors second = taken({{"a", a}, {"c", torch::ones({4}, torch::kBool)}});
  CHECK(second.at("a").const_data_ptr() == memory);
  CHECK(second.at("a").eq(2).all().item<bool>());
  CHECK(second.count("b") == 0);
  CHECK(same_bits(second.at("c"), torch::ones({4}, torch::kBool)));
  const detail::TensorsByFile files =
      snapshot.take({{"model", {{"a", a}}}, {"session", {{"a", torch::ones({700})}}}});
  CHECK(files[0].second.at("a").eq(2).all().item<bool>());
  CHECK(files[1].second.at("a").eq(1).all().item<bool>());
}

TEST_CASE("SIGTERM and SIGINT stop a run after its step, with a checkpoint",
          "[session][resume][checkpoint]") {
  for (const int signal : {SIGTERM, SIGINT}) {
    const TemporaryFolder folder;
    const auto options = CheckpointsOptions(folder.path()).every(100).stop_on_signal(true);
    SmallRun whole(all_optimizers().front(), {});
    for (int step = 0; step < 5; ++step) whole.step();
    {
      SmallRun run(all_optimizers().front(), {});
      run.session->use(Checkpoints(options));
      run.step();
      CHECK_FALSE(run.session->should_stop());
      run.step([&](SmallModel&) { ::raise(signal); });
      CHECK(run.session->should_stop());
      CHECK(stored_steps(folder.path()) == std::vector<int64_t>{2});
      run.finish();
      CHECK(stored_steps(folder.path()) == std::vector<int64_t>{2});
    }
    SmallRun resumed(all_optimizers().front(), {});
    resumed.session->use(Checkpoints(options));
    REQUIRE(resumed.resume() == 2);
    CHECK_FALSE(resumed.session->should_stop());
    for (int step = 2; step < 5; ++step) resumed.step();
    CHECK(first_difference(resumed.state(), whole.state()) == "");
  }
}

TEST_CASE("ranks stop after the same step, whichever of them was asked",
          "[session][resume][checkpoint][ranks]") {
  // The signal comes to the process, which is all ranks here; one rank alone looks at it.
  const TemporaryFolder folder;
  SmallRuns runs = runs_with(CheckpointsOptions(folder.path()).every(100).stop_on_signal(true), 3);
  std::atomic<bool> asked{false};
  for (size_t rank = 0; rank < 3; ++rank) {
    runs[rank]->parts->asks_to_stop = [&asked, rank] { return rank == 1 && asked; };
  }
  REQUIRE(first_of(on_all_ranks(runs, [](SmallRun& run, int) { run.step(); })) == "");
  asked = true;
  REQUIRE(first_of(on_all_ranks(runs, [](SmallRun& run, int) { run.step(); })) == "");
  for (const auto& run : runs) CHECK(run->session->should_stop());
  CHECK(stored_steps(folder.path()) == std::vector<int64_t>{2});
}

TEST_CASE("a second signal ends the process, and without a run signals are as they were",
          "[session][checkpoint]") {
  const pid_t child = fork();
  if (child == 0) {
    {
      const detail::StopSignals signals;
      ::raise(SIGINT);
      if (!detail::StopSignals::requested()) _exit(1);
    }
    {
      const detail::StopSignals signals;
      if (detail::StopSignals::requested()) _exit(2);
      ::raise(SIGTERM);
      if (!detail::StopSignals::requested()) _exit(3);
      ::raise(SIGINT);
    }
    _exit(4);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGINT));
}

}  // namespace pacer::testing
