// A Session whose optimizer averages the weights: what is measured and kept is the average, what is trained and
// resumed are the weights of training, to the bit.
#include <stdexcept>

#include <pacer/checkpoints/all.h>
#include <pacer/optimizers/schedule_free.h>
#include <pacer/session/all.h>

#include "support/catch.h"
#include "support/checkpoints/stored_checkpoints.h"
#include "support/message_of.h"
#include "support/session/small_run.h"

namespace pacer::testing::averaged_evaluation {
namespace {

const std::vector<const char*> kAveraging = {"ScheduleFreeAdamW", "ScheduleFreeAdamW bf16 remainder"};

NamedTensors model_of(SmallRun& run) {
  NamedTensors model;
  for (const auto& item : run.model->named_parameters())
    model.emplace(item.key(), item.value().detach().clone());
  return model;
}

// The average that eval() puts into the model, and takes out again.
NamedTensors average_of(SmallRun& run) {
  auto& optimizer = static_cast<ScheduleFreeAdamW&>(*run.optimizer);
  optimizer.eval();
  NamedTensors average = model_of(run);
  optimizer.train();
  return average;
}

NamedTensors file_of(const std::string& path) {
  FileReader reader(posix_file_system(), path);
  return detail::read_tensors(reader, path);
}

}  // namespace

TEST_CASE("an evaluation sees the average, and training goes on with the bits that it had",
          "[session][schedule-free]") {
  for (const char* name : kAveraging) {
    INFO(name);
    SmallRun plain(registered_optimizer(name), {}), measured(registered_optimizer(name), {});
    for (int step = 0; step < 5; ++step) {
      plain.step();
      measured.step();
      const NamedTensors before = model_of(measured), average = average_of(measured);
      if (step > 0) CHECK(first_difference(before, average) != "");
      measured.session->evaluate([&] {
        CHECK(first_difference(model_of(measured), average) == "");
        measured.session->evaluate([&] { CHECK(first_difference(model_of(measured), average) == ""); });
        CHECK(first_difference(model_of(measured), average) == "");
      });
      CHECK_THROWS_AS(measured.session->evaluate([] { throw std::runtime_error("made up"); }),
                      std::runtime_error);
      CHECK(first_difference(model_of(measured), before) == "");
    }
    CHECK(first_difference(plain.state(), measured.state()) == "");
  }
}

TEST_CASE("validation measures the average, SaveBest and save_weights write it, and a checkpoint goes on",
          "[session][schedule-free][resume]") {
  for (const char* name : kAveraging) {
    INFO(name);
    const TemporaryFolder folder;
    NamedTensors measured;
    SmallRun best(registered_optimizer(name), {}), whole(registered_optimizer(name), {});
    best.session->use(SaveBest(folder.path("best"))).use(Validation(2, [&] {
      measured = model_of(best);
      return 1.0 / static_cast<double>(best.session->progress().step);  // always better
    }));
    whole.session->use(Checkpoints(CheckpointsOptions(folder.path("run")).every(4).synchronous(true)));
    for (int step = 0; step < 4; ++step) {
      best.step();
      whole.step();
    }
    const NamedTensors average = average_of(whole), weights = model_of(whole);
    CHECK(first_difference(measured, average) == "");
    CHECK(first_difference(file_of(folder.path("best") + "/model.safetensors"), average) == "");
    CHECK(first_difference(model_of(best), weights) == "");
    whole.session->evaluate([&] { save_weights(*whole.model, folder.path("average.safetensors")); });
    CHECK(first_difference(file_of(folder.path("average.safetensors")), average) == "");
    CHECK(first_difference(model_of(whole), weights) == "");

    SmallRun resumed(registered_optimizer(name), {});
    resumed.session->use(Checkpoints(CheckpointsOptions(folder.path("run")).every(100)));
    REQUIRE(resumed.resume() == 4);
    CHECK(first_difference(model_of(resumed), weights) == "");
    CHECK(first_difference(average_of(resumed), average) == "");
    for (int step = 0; step < 3; ++step) {
      whole.step();
      resumed.step();
    }
    CHECK(first_difference(model_of(whole), model_of(resumed)) == "");
    CHECK(first_difference(average_of(whole), average_of(resumed)) == "");
  }
}

TEST_CASE("neither a checkpoint nor a step takes the average for the weights of training",
          "[session][schedule-free]") {
  const TemporaryFolder folder;
  SmallRun run(registered_optimizer("ScheduleFreeAdamW"), {});
  const auto checkpoints =
      std::make_shared<Checkpoints>(CheckpointsOptions(folder.path()).every(100).synchronous(true));
  run.session->use(checkpoints);
  for (int step = 0; step < 2; ++step) run.step();
  const auto refusal = [](const std::string& what) {
    return "ScheduleFreeAdamW: " + what +
           " belongs to the weights of training, but the parameters hold their "
           "average now; call train() first, or end the evaluation of the Session";
  };
  run.session->evaluate(
      [&] { CHECK(contains(message_of<Error>([&] { checkpoints->save_now(); }), refusal("export_state"))); });
  auto& optimizer = static_cast<ScheduleFreeAdamW&>(*run.optimizer);
  optimizer.eval();
  CHECK(message_of<InvalidArgument>([&] { run.step(); }) == refusal("step"));
  optimizer.train();
  CHECK(run.session->step());
  CHECK(run.session->progress().step == 3);
  CHECK_FALSE(checkpoints->save_now().empty());
}

}  // namespace pacer::testing::averaged_evaluation
