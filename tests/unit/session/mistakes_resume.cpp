// Mistakes where a run goes on from a checkpoint, and which learning rates it then takes.
#include <torch/optim/sgd.h>

#include "support/catch.h"
#include "support/session/mistakes_trainer.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

// Saves two steps of a run into `folder`, then sets up another one there.
Mistake at_resume(std::string name, std::vector<std::string> says,
                  std::function<void(const std::string&)> resume) {
  return {std::move(name), std::move(says), [resume = std::move(resume)] {
            const TemporaryFolder folder;
            {
              Trainer t(0.01);
              t.session.use(Checkpoints(CheckpointsOptions(folder.path("c"))));
              t.steps(2);
              t.session.finish();
            }
            resume(folder.path("c"));
          }};
}

std::vector<Mistake> resume_mistakes() {
  const auto checkpoints = [](const std::string& folder) { return Checkpoints(CheckpointsOptions(folder)); };
  return {
      at_resume("another learning rate",
                {"learning rate 0.01 of the checkpoint", "program says 0.5", "ResumedRates"},
                [=](const std::string& folder) {
                  Trainer t(0.5);
                  t.session.use(checkpoints(folder));
                  t.session.resume();
                }),
      at_resume("another model", {"bias", "build the model that was saved"},
                [=](const std::string& folder) {
                  torch::nn::Linear model(torch::nn::LinearOptions(3, 2).bias(false));
                  FusedAdamW optimizer(model->parameters());
                  Session session(model, optimizer);
                  session.use(checkpoints(folder)).resume();
                }),
      at_resume("a model of another width", {"shape [2, 3]", "shape [2, 4]"},
                [=](const std::string& folder) {
                  torch::nn::Linear model(4, 2);
                  FusedAdamW optimizer(model->parameters());
                  Session session(model, optimizer);
                  session.use(checkpoints(folder)).resume();
                }),
      at_resume("another optimizer",
                {"was saved by FusedAdamW, but this is FusedLamb", "go on with FusedAdamW"},
                [=](const std::string& folder) {
                  torch::nn::Linear model(3, 2);
                  FusedLamb optimizer(model->parameters());
                  Session session(model, optimizer);
                  session.use(checkpoints(folder)).resume();
                }),
      at_resume("one of torch's optimizers", {"was saved by FusedAdamW, but this is torch::optim::SGD"},
                [=](const std::string& folder) {
                  torch::nn::Linear model(3, 2);
                  torch::optim::SGD optimizer(model->parameters(), 0.1);
                  Session session(model, optimizer);
                  session.use(checkpoints(folder)).resume();
                }),
      at_resume("a hook more", {"hook/learning_rate", "hooks that were in use"},
                [=](const std::string& folder) {
                  Trainer t;
                  t.session.use(checkpoints(folder)).use(LearningRate(constant_schedule()));
                  t.session.resume();
                }),
      at_resume("resume after the first step", {"resume belongs before the first begin"},
                [=](const std::string& folder) {
                  Trainer t;
                  t.session.use(checkpoints(folder));
                  t.session.resume();
                  t.micro_step();
                  t.session.resume();
                }),
      at_resume("a run that does not resume",
                {"has checkpoints of another run", "session.resume()", "another folder"},
                [=](const std::string& folder) {
                  Trainer t;
                  t.session.use(checkpoints(folder));
                  t.micro_step();
                }),
      at_resume("a checkpoint that is damaged", {"none of the 1 checkpoints", "can be read"},
                [=](const std::string& folder) {
                  put_content(folder + "/step-0000000002/model.safetensors", "damaged");
                  Trainer t;
                  t.session.use(checkpoints(folder));
                  t.session.resume();
                }),
  };
}

}  // namespace

TEST_CASE("mistakes at resume are told in a sentence", "[mistakes]") {
  const auto mistakes = resume_mistakes();
  CHECK(faults_of(mistakes) == "");
  CHECK(mistakes.size() == 9);
}

TEST_CASE("a resumed run takes the rates that it is told to take", "[mistakes][resume]") {
  for (const bool scheduled : {false, true}) {
    for (const auto rates : {ResumedRates::checkpoint, ResumedRates::program}) {
      const TemporaryFolder folder;
      const auto use = [&](Trainer& t) {
        t.session.use(Checkpoints(CheckpointsOptions(folder.path("c"))));
        if (scheduled) t.session.use(LearningRate(constant_schedule()));
      };
      {
        Trainer t(0.01);
        use(t);
        t.steps(2);
        t.session.finish();
      }
      Trainer t(0.5);
      use(t);
      const std::string heard =
          heard_of([&] { CHECK(t.session.resume(ResumeOptions().learning_rates(rates)) == 2); });
      const double wanted = rates == ResumedRates::program ? 0.5 : 0.01;
      CHECK(contains(heard, "the program says 0.5") == (rates == ResumedRates::checkpoint));
      t.steps(2);
      CHECK(t.optimizer.param_groups()[0].options().get_lr() == wanted);
      t.session.finish();
    }
  }
}

}  // namespace pacer::testing
