// When Sessions that resumed together save, and what becomes of their last steps.
#include <csignal>
#include <memory>
#include <string>

#include "support/catch.h"
#include "support/session/sessions_together.h"
#include "support/session/two_layers.h"
#include "support/temporary_folder.h"

namespace pacer::testing::session_save_together {

TEST_CASE("Sessions that resumed together save at the end of the last one's step, whichever is due",
          "[session][resume][gan]") {
  const TemporaryFolder folder;
  SmallGanOptions options;
  options.critic_steps = 5;
  options.every = 9;  // the discriminator is due within the second round, the generator in the ninth
  SmallGan gan(folder.path(), options);
  resume_quietly(gan);
  gan.round();
  CHECK(stored_steps(folder.path() + "/generator").empty());
  gan.step_discriminator();
  gan.step_discriminator();
  CHECK(stored_steps(folder.path() + "/discriminator").empty());
  for (int step = 0; step < 3; ++step) gan.step_discriminator();
  gan.step_generator();
  CHECK(stored_steps(folder.path() + "/discriminator") == std::vector<int64_t>{10});
  CHECK(stored_steps(folder.path() + "/generator") == std::vector<int64_t>{2});

  SECTION("save_now of one of them saves all") {
    gan.round();
    CHECK(checkpoints_of(gan.discriminates).save_now() == folder_of(folder.path(), "discriminator", 15));
    CHECK(stored_steps(folder.path() + "/generator") == std::vector<int64_t>{3, 2});
    gan.finish();
    CHECK(stored_steps(folder.path() + "/discriminator") == std::vector<int64_t>{15, 10});
  }
  SECTION("finish saves what is left, once all have ended") {
    gan.round();
    gan.discriminates.finish();
    CHECK(stored_steps(folder.path() + "/discriminator") == std::vector<int64_t>{10});
    gan.generates.finish();
    CHECK(stored_steps(folder.path() + "/discriminator") == std::vector<int64_t>{15, 10});
    CHECK(stored_steps(folder.path() + "/generator") == std::vector<int64_t>{3, 2});
  }
  SECTION("what one of them has stepped alone is saved with the other as it is") {
    gan.step_generator();
    const auto state = gan.state();
    gan.finish();
    CHECK(stored_steps(folder.path() + "/discriminator") == std::vector<int64_t>{10});
    CHECK(stored_steps(folder.path() + "/generator") == std::vector<int64_t>{3, 2});
    SmallGan resumed(folder.path(), options);
    REQUIRE(resume_quietly(resumed) == 3);
    CHECK(first_difference(resumed.state(), state) == "");
  }
}

TEST_CASE("Sessions that resumed together and end at once save nothing, and say nothing of it",
          "[session][resume][gan]") {
  const TemporaryFolder folder;
  {
    SmallGan gan(folder.path());
    resume_quietly(gan);
    gan.round();
    gan.finish();
  }
  const std::string generator = folder_of(folder.path(), "generator", 1);
  const auto text = [&] { return open_checkpoint(generator).files.at("saved-together.txt"); };
  const std::vector<char> saved = text();
  SmallGan resumed(folder.path());
  const CapturedStderr said;
  REQUIRE(resumed.resume() == 1);
  CHECK(checkpoints_of(resumed.generates).save_now() == generator);
  resumed.finish();
  CHECK_FALSE(contains(said.text(), "not saved"));
  CHECK(text() == saved);
}

TEST_CASE("a signal stops Sessions that resumed together with checkpoints of one moment",
          "[session][resume][gan]") {
  const TemporaryFolder folder;
  SmallGanOptions options;
  options.critic_steps = 2;
  options.every = 100;
  options.stop_on_signal = true;
  {
    SmallGan gan(folder.path(), options);
    resume_quietly(gan);
    gan.round();
    gan.step_discriminator();
    ::raise(SIGTERM);
    gan.step_discriminator();
    CHECK(gan.discriminates.should_stop());
    CHECK(stored_steps(folder.path() + "/discriminator").empty());
    gan.step_generator();
    CHECK(gan.generates.should_stop());
    CHECK(stored_steps(folder.path() + "/discriminator") == std::vector<int64_t>{4});
    CHECK(stored_steps(folder.path() + "/generator") == std::vector<int64_t>{2});
    gan.finish();
  }
  SmallGan resumed(folder.path(), options);
  CHECK(resume_quietly(resumed) == 2);
}

TEST_CASE("a checkpoint that takes the place of another is written behind those of the other Sessions",
          "[session][resume][gan]") {
  const TemporaryFolder folder;
  SmallGanOptions options;
  options.every = 100;
  std::vector<detail::TrainingState> saved;
  {
    const CapturedStderr quiet;
    SmallGan gan(folder.path(), options);
    gan.resume();
    gan.round();
    checkpoints_of(gan.discriminates).save_now();
    saved = gan.state();
    gan.step_generator();  // the discriminator has a checkpoint of its step, in which buffers were others
    const std::string generator = folder.path() + "/generator";
    run_command("mv " + generator + " " + generator + ".away && touch " + generator);
    CHECK(refusal([&] { checkpoints_of(gan.discriminates).save_now(); }) != "");
    run_command("rm " + generator + " && mv " + generator + ".away " + generator);
  }
  SmallGan resumed(folder.path(), options);
  REQUIRE(resume_quietly(resumed) == 1);
  CHECK(first_difference(resumed.state(), saved) == "");
}

TEST_CASE("a save waits where two Sessions have taken no step, and finish says what is not saved",
          "[session][resume]") {
  const TemporaryFolder folder;
  const CapturedStderr said;
  ThreeSessions run(folder.path());
  resume_together(run.all);
  run.round();
  run.step(2);
  const std::string message = refusal([&] { checkpoints_of(*run.all[0]).save_now(); });
  CHECK(contains(message, folder.path() + "/0 and " + folder.path() + "/1"));
  CHECK(run.steps_of(2) == std::vector<int64_t>{1});
  SECTION("until all but one have") {
    run.step(1);
    run.step(2);
    run.finish();
    CHECK(run.steps_of(0) == std::vector<int64_t>{1});
    CHECK(run.steps_of(1) == std::vector<int64_t>{2, 1});
    CHECK(run.steps_of(2) == std::vector<int64_t>{3, 1});
  }
  SECTION("or the run ends") {
    run.finish();
    CHECK(contains(said.text(), "the last steps are not saved"));
    CHECK(run.steps_of(2) == std::vector<int64_t>{1});
  }
}

namespace {

// Two Sessions of one model that have resumed together, the first of which may go.
struct TwoOfOneModel {
  TwoOfOneModel(const std::string& folder, int64_t every)
      : first(std::make_unique<Session>(model, of_first)), second(model, of_second) {
    first->use(Checkpoints(CheckpointsOptions(folder + "/first").every(every)));
    second.use(Checkpoints(CheckpointsOptions(folder + "/second").every(every)));
    resume_together({first.get(), &second});
  }
  void pass(Session& session) {
    of_first.zero_grad();
    auto [x] = session.begin(batch_of(0, 3));
    session.backward(model->forward(x).square().mean());
  }
  torch::nn::Sequential model = two_layers();
  FusedAdam of_first{model->parameters(), FusedAdamOptions(0.01)};
  FusedAdam of_second{model->parameters(), FusedAdamOptions(0.01)};
  std::unique_ptr<Session> first;
  Session second;
};

}  // namespace

TEST_CASE("a Session that is gone before the others have finished is told of",
          "[session][resume][gan][errors]") {
  const TemporaryFolder folder;
  const CapturedStderr quiet;
  TwoOfOneModel two(folder.path(), /*every=*/1);
  two.first.reset();
  two.pass(two.second);
  CHECK(contains(refusal([&] { two.second.step(); }), "until each has called finish()"));
}

TEST_CASE("a Session that has finished is kept until the others have, or they say what is not saved",
          "[session][resume][gan][errors]") {
  const TemporaryFolder folder;
  const CapturedStderr quiet;
  TwoOfOneModel two(folder.path(), /*every=*/100);
  for (Session* session : {two.first.get(), &two.second}) {
    two.pass(*session);
    session->step();
  }
  two.first->finish();
  two.first.reset();
  CHECK(contains(refusal([&] { two.second.finish(); }), "until each has called finish()"));
}

TEST_CASE("Sessions are not saved inside of a window", "[session][resume]") {
  const TemporaryFolder folder;
  const CapturedStderr quiet;
  std::vector models{two_layers(), two_layers()};
  FusedAdam of_first(models[0]->parameters(), FusedAdamOptions(0.01)),
      of_second(models[1]->parameters(), FusedAdamOptions(0.01));
  Session first(models[0], of_first), second(models[1], of_second);
  first.use(GradientAccumulation(3))
      .use(Checkpoints(CheckpointsOptions(folder.path() + "/first").every(100)));
  second.use(Checkpoints(CheckpointsOptions(folder.path() + "/second").every(2)));
  resume_together({&first, &second});
  for (int round = 1; round <= 6; ++round) {
    for (size_t i = 0; i < 2; ++i) {
      Session& session = i == 0 ? first : second;
      auto [x] = session.begin(batch_of(round, 3));
      session.backward(models[i]->forward(x).square().mean());
      session.step();
    }
    if (round == 2) CHECK(stored_steps(folder.path() + "/second").empty());
  }
  first.finish();
  second.finish();
  CHECK(stored_steps(folder.path() + "/second") == std::vector<int64_t>{6, 3});
  CHECK(stored_steps(folder.path() + "/first") == std::vector<int64_t>{2, 1});
}

}  // namespace pacer::testing::session_save_together
