// The Sessions of a GAN that go on together, wherever the program died.
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include <pacer/parallel/shards.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/session/sessions_together.h"
#include "support/temporary_folder.h"

namespace pacer::testing::session_resume_together {
namespace {

// The states after each round of an uninterrupted run, from before the first on.
std::vector<std::vector<detail::TrainingState>> states_of(SmallGan& gan, int rounds) {
  std::vector<std::vector<detail::TrainingState>> states{gan.state()};
  for (int round = 0; round < rounds; ++round) {
    gan.round();
    states.push_back(gan.state());
  }
  return states;
}

SmallGanOptions unsaved(int critic_steps) {
  SmallGanOptions options;
  options.critic_steps = critic_steps;
  options.is_saved = false;
  return options;
}

void train_one_round(const std::string& folder) {
  SmallGan run(folder);
  resume_quietly(run);
  run.round();
  run.finish();
}

}  // namespace

TEST_CASE("the Sessions of a GAN go on together to the bit, wherever the program died",
          "[session][resume][gan]") {
  constexpr int kRounds = 4, kKilledIn = 3;
  for (const int critic_steps : {1, 5}) {
    SmallGan whole("", unsaved(critic_steps));
    torch::manual_seed(3);
    const auto states = states_of(whole, kRounds);
    for (const bool synchronous : {true, false}) {
      const TemporaryFolder complete;
      {
        SmallGanOptions options;
        options.critic_steps = critic_steps;
        options.synchronous = synchronous;
        options.keep = 2;
        SmallGan killed(complete.path(), options);
        torch::manual_seed(3);
        REQUIRE(resume_quietly(killed) == std::nullopt);
        for (int round = 0; round < kKilledIn; ++round) killed.round();
        killed.finish();
      }
      // What the disk may have of the last save: each of the two or not.
      for (const auto& [has_discriminator, has_generator] :
           {std::pair(true, true), std::pair(true, false), std::pair(false, true), std::pair(false, false)}) {
        CAPTURE(critic_steps, synchronous, has_discriminator, has_generator);
        const TemporaryFolder left;
        const std::string folder = left.path() + "/run";
        copy_folder(complete.path(), folder);
        if (!has_discriminator) remove_folder(folder_of(folder, "discriminator", kKilledIn * critic_steps));
        if (!has_generator) remove_folder(folder_of(folder, "generator", kKilledIn));
        SmallGanOptions options;
        options.critic_steps = critic_steps;
        SmallGan resumed(folder, options);
        torch::manual_seed(99);
        const int64_t round = has_discriminator && has_generator ? kKilledIn : kKilledIn - 1;
        REQUIRE(resume_quietly(resumed) == round);
        CHECK(resumed.discriminates.progress().step == round * critic_steps);
        CHECK(first_difference(resumed.state(), states[static_cast<size_t>(round)]) == "");
        for (auto next = static_cast<size_t>(round) + 1; next <= kRounds; ++next) {
          resumed.round();
          CHECK(first_difference(resumed.state(), states[next]) == "");
        }
        resumed.finish();
        CHECK(stored_steps(folder + "/generator").front() == kRounds);
        CHECK(stored_steps(folder + "/discriminator").front() == kRounds * critic_steps);
      }
    }
  }
}

TEST_CASE("ranks resume several Sessions together, also where they share the optimizers out",
          "[session][resume][gan][ranks][shards]") {
  const std::optional<Sharded> what =
      GENERATE(std::optional<Sharded>(), std::optional(Sharded::state), std::optional(Sharded::gradients));
  CAPTURE(what.has_value());
  const auto gans_in = [&](const std::string& folder) {
    std::vector<std::unique_ptr<SmallGan>> ranks;
    for (const auto& world : Communicator::in_process(2)) {
      ranks.push_back(std::make_unique<SmallGan>(folder, SmallGanOptions(), world));
      if (!what) continue;
      for (Session* session : {&ranks.back()->discriminates, &ranks.back()->generates}) {
        session->use(Shards(ShardsOptions().what(*what).unit_bytes(600)));
      }
    }
    return ranks;
  };
  const auto on_all = [](std::vector<std::unique_ptr<SmallGan>>& ranks,
                         const std::function<void(SmallGan&)>& f) {
    return first_of(run_ranks(2, [&](int rank) { f(*ranks[static_cast<size_t>(rank)]); }));
  };
  const auto round = [](SmallGan& gan) { gan.round(); };
  const CapturedStderr quiet;
  const TemporaryFolder folder, of_whole;
  auto whole = gans_in(of_whole.path());
  REQUIRE(on_all(whole, [](SmallGan& gan) { RANK_REQUIRE(gan.resume() == std::nullopt); }) == "");
  for (int i = 0; i < 4; ++i) REQUIRE(on_all(whole, round) == "");
  {
    auto killed = gans_in(folder.path());
    REQUIRE(on_all(killed, [](SmallGan& gan) { RANK_REQUIRE(gan.resume() == std::nullopt); }) == "");
    for (int i = 0; i < 3; ++i) REQUIRE(on_all(killed, round) == "");
    REQUIRE(on_all(killed, [](SmallGan& gan) { gan.finish(); }) == "");
  }
  remove_folder(folder_of(folder.path(), "generator", 3));
  auto resumed = gans_in(folder.path());
  REQUIRE(on_all(resumed, [](SmallGan& gan) { RANK_REQUIRE(gan.resume() == 2); }) == "");
  for (int i = 2; i < 4; ++i) REQUIRE(on_all(resumed, round) == "");
  CHECK(first_difference(resumed[0]->state()[0].model, whole[0]->state()[0].model) == "");
  CHECK(first_difference(resumed[0]->state()[1].model, whole[0]->state()[1].model) == "");
}

TEST_CASE("a program that died in its first save of several Sessions begins anew", "[session][resume][gan]") {
  for (const char* lost : {"generator", "discriminator"}) {
    CAPTURE(lost);
    const TemporaryFolder folder;
    SmallGan whole("", unsaved(1));
    torch::manual_seed(3);
    const auto states = states_of(whole, 2);
    {
      SmallGan killed(folder.path());
      resume_quietly(killed);
      killed.round();
      killed.finish();
    }
    remove_folder(folder_of(folder.path(), lost, 1));
    SmallGan again(folder.path());
    torch::manual_seed(3);
    REQUIRE(resume_quietly(again) == std::nullopt);
    again.round();
    again.round();
    CHECK(first_difference(again.state(), states[2]) == "");
    again.finish();
    SmallGan resumed(folder.path());
    CHECK(resume_quietly(resumed) == 2);
  }
}

TEST_CASE("a folder that is not there is no first save", "[session][resume][gan][errors]") {
  const TemporaryFolder folder;
  {
    SmallGan ended(folder.path());
    resume_quietly(ended);
    ended.round();
    ended.finish();
  }
  remove_folder(folder.path() + "/generator");
  SmallGan again(folder.path());
  const std::string message = refusal([&] { again.resume(); });
  CHECK(contains(message, folder.path() + "/generator has none"));
  CHECK(contains(message, "bring back what is missing"));
}

TEST_CASE("checkpoints of two attempts at one step are not mixed", "[session][resume][gan]") {
  const TemporaryFolder folder, kept;
  const auto rounds = [&](int count) {
    SmallGan gan(folder.path());
    resume_quietly(gan);
    for (int i = 0; i < count; ++i) gan.round();
    gan.finish();
  };
  rounds(2);
  const std::string second = folder_of(folder.path(), "discriminator", 2);
  copy_folder(second, kept.path() + "/second");
  remove_folder(folder_of(folder.path(), "generator", 2));
  rounds(1);  // from step 1 to 2 again
  remove_folder(second);
  copy_folder(kept.path() + "/second", second);
  SmallGan resumed(folder.path());
  CHECK(resume_quietly(resumed) == 1);
}

TEST_CASE("Sessions resume together or not at all", "[session][resume][gan][errors]") {
  const TemporaryFolder folder;
  train_one_round(folder.path());
  SmallGanOptions wider;
  wider.channels = 5;
  SmallGan other(folder.path(), wider);
  torch::manual_seed(5);
  const auto before = other.state();
  const std::string message = refusal([&] { resume_quietly(other); });
  CHECK(contains(message, "cannot resume from " + folder.path() + "/generator/step-0000000001"));
  CHECK(first_difference(other.state(), before) == "");
  CHECK(other.discriminates.progress().step == 0);

  SmallGan fitting(folder.path());
  CHECK(resume_quietly(fitting) == 1);
}

TEST_CASE("a Session that resumes alone from what was saved together says so", "[session][resume][gan]") {
  const TemporaryFolder folder;
  train_one_round(folder.path());
  SmallGan gan(folder.path());
  const CapturedStderr said;
  CHECK(gan.generates.resume() == 1);
  CHECK(contains(said.text(),
                 "saved together with those of other Sessions; resume() goes on with this Session"));
  SmallGan together(folder.path());
  const CapturedStderr of_both;
  CHECK(resume_together({&together.discriminates, &together.generates}) == 1);
  CHECK(!contains(of_both.text(), "goes on with this Session alone"));
}

TEST_CASE("Sessions without checkpoints that belong together are refused, and change nothing",
          "[session][resume][gan][errors]") {
  const TemporaryFolder folder;
  {
    SmallGan run(folder.path());
    resume_quietly(run);
    for (int round = 0; round < 3; ++round) run.round();
    run.finish();
  }
  const auto message_of_resume = [&](SmallGan& gan) {
    const auto before = gan.state();
    std::string message = refusal([&] { resume_quietly(gan); });
    CHECK(first_difference(gan.state(), before) == "");
    return message;
  };
  SECTION("one has lost all of its own") {
    remove_folder(folder.path() + "/generator");
    SmallGan resumed(folder.path());
    const std::string message = message_of_resume(resumed);
    CHECK(contains(message, folder.path() + "/discriminator has steps 3, 2, 1"));
    CHECK(contains(message, folder.path() + "/generator has none"));
    CHECK(contains(message, "bring back"));
  }
  SECTION("none is of the same moment") {
    remove_folder(folder_of(folder.path(), "generator", 3));
    remove_folder(folder_of(folder.path(), "generator", 1));
    remove_folder(folder_of(folder.path(), "discriminator", 2));
    SmallGan resumed(folder.path());
    const std::string message = message_of_resume(resumed);
    CHECK(contains(message, "/discriminator has steps 3, 1"));
    CHECK(contains(message, "/generator has steps 2"));
  }
  SECTION("all that one has is damaged") {
    for (int step = 1; step <= 3; ++step) {
      run_command("printf x >> " + folder_of(folder.path(), "generator", step) + "/model.safetensors");
    }
    SmallGan resumed(folder.path());
    CHECK(contains(message_of_resume(resumed), "none of the checkpoints in " + folder.path() + "/generator"));
  }
  SECTION("they were saved alone") {
    const TemporaryFolder alone;
    {
      SmallGan run(alone.path());
      const CapturedStderr quiet;
      run.discriminates.resume();
      run.generates.resume();
      run.round();
      run.finish();
    }
    SmallGan resumed(alone.path());
    const std::string message = message_of_resume(resumed);
    CHECK(contains(message, "/discriminator has steps 1 (saved alone)"));
    CHECK(contains(message, "session.resume("));
  }
  SECTION("the step that was asked for is not there") {
    SmallGan resumed(folder.path());
    const std::string message = refusal([&] { resumed.resume(ResumeOptions().step(7)); });
    CHECK(contains(message, "with step 7"));
    CHECK(contains(message, "has steps 3, 2, 1"));
    const CapturedStderr quiet;
    CHECK(resumed.resume(ResumeOptions().step(2)) == 2);
  }
}

TEST_CASE("resume_together says what it needs", "[session][resume][gan][errors]") {
  const TemporaryFolder folder;
  SmallGan gan(folder.path());
  CHECK(contains(refusal([&] { resume_together({&gan.generates}); }), "two Sessions"));
  CHECK(contains(refusal([&] { resume_together({&gan.generates, nullptr}); }), "two Sessions"));
  CHECK(contains(refusal([&] { resume_together({&gan.generates, &gan.generates}); }), "twice"));
  SmallGan without("", unsaved(1));
  const std::string message = refusal([&] { resume_together({&gan.generates, &without.discriminates}); });
  CHECK(contains(message, "Session 1"));
  CHECK(contains(message, "no Checkpoints"));
  SmallGanOptions one;
  one.keep = 1;
  SmallGan forgetful(folder.path(), one);
  const std::string of_keep = refusal([&] { forgetful.resume(); });
  CHECK(contains(of_keep, folder.path() + "/discriminator"));
  CHECK(contains(of_keep, "keep(2)"));
  resume_quietly(gan);
  CHECK(contains(refusal([&] { gan.resume(); }), "give all Sessions of a program in one call"));
  gan.round();
  gan.finish();
}

TEST_CASE("Sessions go on from the newest moment at which all were finite, however long ago",
          "[session][resume]") {
  const TemporaryFolder folder;
  const CapturedStderr quiet;
  {
    ThreeSessions run(folder.path());
    resume_together(run.all);
    run.round();
    run.round();
    run.spoil(1);
    for (int i = 0; i < 5; ++i) run.round();
    run.finish();
    CHECK(run.steps_of(0) == std::vector<int64_t>{7, 6, 5, 2});
    CHECK(run.steps_of(1) == std::vector<int64_t>{7, 6, 5, 2});
  }
  {
    ThreeSessions again(folder.path());
    REQUIRE(resume_together(again.all) == 2);
    again.spoil(2);
    for (int i = 0; i < 5; ++i) again.round();
    again.finish();
  }
  ThreeSessions resumed(folder.path());
  CHECK(resume_together(resumed.all) == 2);
}

TEST_CASE("the newest moment at which all were finite is not written over by one that is not",
          "[session][resume]") {
  const TemporaryFolder folder;
  const CapturedStderr said;
  {
    ThreeSessions run(folder.path());
    resume_together(run.all);
    for (int i = 0; i < 3; ++i) run.round();
    run.step(1);
    run.step(0);
    run.spoil(0);
    run.step(0);  // ends the run; the last Session has a checkpoint of its step
    run.finish();
    CHECK(contains(said.text(), "is of the newest moment at which all were"));
  }
  ThreeSessions resumed(folder.path());
  CHECK(resume_together(resumed.all) == 3);
}

TEST_CASE("what is frozen while another network trains must be finite, too", "[session][resume][gan]") {
  const TemporaryFolder folder;
  const CapturedStderr quiet;
  const auto round = [](ThreeSessions& run) {
    run.step(0);
    run.step(1);
    run.freeze(0, true);
    run.step(2);  // all are saved
    run.freeze(0, false);
  };
  {
    ThreeSessions run(folder.path());
    resume_together(run.all);
    round(run);
    round(run);
    run.spoil(0);
    for (int i = 0; i < 4; ++i) round(run);
    run.finish();
  }
  ThreeSessions resumed(folder.path());
  CHECK(resume_together(resumed.all) == 2);
}

TEST_CASE("random numbers, too, are as before where the last of three Sessions cannot go on",
          "[session][resume][errors]") {
  const TemporaryFolder folder;
  const CapturedStderr quiet;
  {
    ThreeSessions run(folder.path());
    resume_together(run.all);
    run.round();
    run.finish();
  }
  ThreeSessions other(folder.path(), /*width_of_last=*/5);
  torch::manual_seed(5);
  const Tensor expected = torch::randn({4});
  torch::manual_seed(5);
  CHECK(contains(refusal([&] { resume_together(other.all); }), folder.path() + "/2/step-0000000001"));
  CHECK(same_bits(torch::randn({4}), expected));
}

}  // namespace pacer::testing::session_resume_together
