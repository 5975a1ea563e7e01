// Runs that go on from another checkpoint than the newest, and the Sessions of a GAN that go on together.
#include <optional>
#include <utility>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <pacer/files/checkpoint_folder.h>
#include <pacer/session/resume_together.h>

#include "support/catch.h"
#include "support/checkpoints/stored_checkpoints.h"
#include "support/collectives/ranks.h"
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

// A generator [N, 3] -> [N, 2] and a discriminator [N, 2] -> [N, 1], each with a Session; batches are functions
// of the step and the rank.
class Gan {
 public:
  Gan(const std::string& folder, std::shared_ptr<Communicator> world, int64_t keep = 3)
      : rank_(world->rank()),
        of_generator_(generator_->named_parameters(), FusedAdamWOptions(0.01)),
        of_discriminator_(discriminator_->named_parameters(), FusedAdamWOptions(0.02)),
        discriminates(discriminator_, of_discriminator_, world),
        generates(generator_, of_generator_, world) {
    const CheckpointsOptions options = CheckpointsOptions("").every(1).keep(keep).synchronous(true);
    discriminates.use(Checkpoints(CheckpointsOptions(options).folder(folder + "/discriminator")));
    generates.use(Checkpoints(CheckpointsOptions(options).folder(folder + "/generator")));
  }

  std::optional<int64_t> resume() { return resume_together({&discriminates, &generates}); }

  void step_discriminator() {
    const int64_t number = 2 * discriminates.progress().step + rank_;
    of_discriminator_.zero_grad();
    auto [real, noise] = discriminates.begin(batch_of(number, 2), batch_of(number, 3));
    const Tensor fake = generator_->forward(noise).detach();
    discriminates.backward((discriminator_->forward(fake) - discriminator_->forward(real)).mean());
    discriminates.step();
  }
  void step_generator() {
    of_generator_.zero_grad();
    auto [noise] = generates.begin(batch_of(2 * generates.progress().step + rank_, 3));
    generates.backward(discriminator_->forward(generator_->forward(noise)).square().mean());
    generates.step();
  }
  void step() {
    step_discriminator();
    step_generator();
  }
  void finish() {
    discriminates.finish();
    generates.finish();
  }

  std::vector<Tensor> weights() const {
    std::vector<Tensor> all;
    for (const auto& model : {generator_, discriminator_}) {
      for (const Tensor& parameter : model->parameters()) all.push_back(parameter.detach().clone());
    }
    return all;
  }

 private:
  int rank_;
  torch::nn::Sequential generator_ = two_layers(), discriminator_{torch::nn::Linear(2, 1)};
  FusedAdamW of_generator_, of_discriminator_;

 public:
  Session discriminates, generates;
};

std::vector<std::string> on_all(std::vector<std::unique_ptr<Gan>>& ranks, void (Gan::*f)()) {
  return run_ranks(static_cast<int>(ranks.size()),
                   [&](int rank) { (*ranks[static_cast<size_t>(rank)].*f)(); });
}

std::vector<std::unique_ptr<Gan>> gans_in(const std::string& folder, int world_size) {
  std::vector<std::unique_ptr<Gan>> ranks;
  const auto worlds = Communicator::in_process(world_size);
  for (const auto& world : worlds) ranks.push_back(std::make_unique<Gan>(folder, world));
  return ranks;
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

TEST_CASE("the Sessions of a GAN go on together, wherever the program died", "[session][resume][ranks]") {
  constexpr int kSteps = 5;
  for (const int world_size : {1, 2}) {
    const TemporaryFolder of_whole;
    auto whole = gans_in(of_whole.path(), world_size);
    std::vector<std::vector<Tensor>> weights;
    for (int step = 0; step < kSteps; ++step) {
      REQUIRE(first_of(on_all(whole, &Gan::step)) == "");
      weights.push_back(whole[0]->weights());
    }
    for (const bool between_saves : {false, true}) {
      CAPTURE(world_size, between_saves);
      const TemporaryFolder folder;
      {
        auto killed = gans_in(folder.path(), world_size);
        for (int step = 0; step < 3; ++step) REQUIRE(first_of(on_all(killed, &Gan::step)) == "");
        if (between_saves) REQUIRE(first_of(on_all(killed, &Gan::step_discriminator)) == "");
        REQUIRE(first_of(on_all(killed, &Gan::finish)) == "");
      }
      auto resumed = gans_in(folder.path(), world_size);
      const CapturedStderr quiet;
      const auto messages = run_ranks(
          world_size, [&](int rank) { RANK_REQUIRE(resumed[static_cast<size_t>(rank)]->resume() == 3); });
      REQUIRE(first_of(messages) == "");
      CHECK(same_bits(resumed[0]->weights(), weights[2]));
      for (int step = 3; step < kSteps; ++step) {
        REQUIRE(first_of(on_all(resumed, &Gan::step)) == "");
        CHECK(same_bits(resumed[0]->weights(), weights[static_cast<size_t>(step)]));
      }
    }
  }
}

TEST_CASE("Sessions without a step in common are refused, and change nothing", "[session][resume][errors]") {
  const auto alone = Communicator::alone(at::kCPU);
  const TemporaryFolder folder;
  {
    Gan first(folder.path(), alone, /*keep=*/1);
    const CapturedStderr quiet;
    CHECK(first.resume() == std::nullopt);
    first.step();
    first.step_discriminator();
    first.finish();
  }
  Gan resumed(folder.path(), alone);
  const auto before = resumed.weights();
  const std::string message = refusal([&] { resumed.resume(); });
  CHECK(contains(message, "2; 1"));
  CHECK(contains(message, "keep(3)"));
  CHECK(same_bits(resumed.weights(), before));
  CHECK(contains(refusal([&] { resume_together({&resumed.generates}); }), "two Sessions"));
  CHECK(contains(refusal([&] { resume_together({&resumed.generates, nullptr}); }), "two Sessions"));

  auto model = two_layers();
  FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(0.01));
  Session without(model, optimizer);
  CHECK(contains(refusal([&] { without.saved_steps(); }), "Checkpoints"));
}

}  // namespace pacer::testing::resume_step
