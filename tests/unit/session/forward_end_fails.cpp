// A hook whose forward_end throws, wherever a forward pass ends: the error is an ordinary exception, all other
// hooks have had their turn, and the Session goes on.
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/modules/linear.h>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/message_of.h"
#include "support/optimizers/optimizers.h"
#include "support/parallel/pipeline_runs.h"

namespace pacer::testing::forward_end_fails {
namespace {

struct Counts {
  bool throws = false;
  int begun = 0, ended = 0;  // by the hook that comes last
};

class Thrower : public Hook {
 public:
  explicit Thrower(std::shared_ptr<Counts> counts) : counts_(std::move(counts)) {}
  std::string hook_name() const override { return "a_thrower"; }
  Slot slot() const override { return Slot::optimize; }
  void forward_end() override {
    if (std::exchange(counts_->throws, false)) throw Error("the hook has failed");
  }

 private:
  std::shared_ptr<Counts> counts_;
};

class Counter : public Hook {
 public:
  explicit Counter(std::shared_ptr<Counts> counts) : counts_(std::move(counts)) {}
  std::string hook_name() const override { return "z_counter"; }
  Slot slot() const override { return Slot::optimize; }
  void forward_begin(const Progress&) override { ++counts_->begun; }
  void forward_end() override { ++counts_->ended; }

 private:
  std::shared_ptr<Counts> counts_;
};

struct Run {
  Run() {
    torch::manual_seed(2);
    model = torch::nn::Linear(3, 2);
    optimizer = std::make_unique<FusedAdamW>(model->named_parameters(), FusedAdamWOptions(0.01));
    session = std::make_unique<Session>(model, *optimizer);
    session->use(Thrower(counts)).use(Counter(counts));
  }
  void step(bool forward_throws = false) {
    auto [x] = session->begin(torch::ones({4, 3}));
    if (forward_throws) throw Error("the model has failed");
    session->backward(model->forward(x).square().mean());
    session->step();
  }
  // The hook that comes last has ended each pass that it began.
  void require_ended() const { REQUIRE(counts->begun == counts->ended); }

  std::shared_ptr<Counts> counts = std::make_shared<Counts>();
  torch::nn::Linear model = nullptr;
  std::unique_ptr<FusedAdamW> optimizer;
  std::unique_ptr<Session> session;
};

const std::string kSays = "the hook has failed";

}  // namespace

TEST_CASE("what a hook throws behind the forward pass comes out of backward, and the next window is whole",
          "[session][hooks][errors]") {
  Run run, twin;
  for (Run* each : {&run, &twin}) each->step();
  run.counts->throws = true;
  CHECK(message_of([&] { run.step(); }) == kSays);
  run.require_ended();
  for (const at::Tensor& parameter : run.model->parameters()) CHECK(!parameter.grad().defined());
  CHECK(run.model->weight.equal(twin.model->weight));
  for (Run* each : {&run, &twin}) each->step();
  CHECK(run.model->weight.equal(twin.model->weight));
  CHECK(run.session->progress().step == 2);
}

TEST_CASE("where the forward pass has thrown, what a hook throws behind it comes out of the next begin",
          "[session][hooks][errors]") {
  Run run;
  run.counts->throws = true;
  CHECK(message_of([&] { run.step(/*forward_throws=*/true); }) == "the model has failed");
  run.require_ended();
  CHECK(message_of([&] { run.step(); }) == kSays);
  run.step();
  run.require_ended();
  CHECK(run.session->progress().step == 1);
}

TEST_CASE("what a hook throws behind an evaluation comes out of it, and the model trains again",
          "[session][hooks][errors]") {
  Run run;
  run.step();
  const auto measure = [&] { return run.model->forward(torch::ones({4, 3})).sum(); };
  const std::vector<std::function<void()>> evaluations = {
      [&] { (void)run.session->evaluate(measure); },
      [&] { run.session->evaluate([&] { (void)measure(); }); }};
  for (const auto& evaluate : evaluations) {
    run.counts->throws = true;
    CHECK(message_of(evaluate) == kSays);
    run.require_ended();
    CHECK(run.model->is_training());
    CHECK(at::GradMode::is_enabled());
    evaluate();
  }
  CHECK(run.session->evaluate(measure).item<float>() == run.session->evaluate(measure).item<float>());
  run.counts->throws = true;
  CHECK(message_of([&] { (void)run.session->evaluate([]() -> float { throw Error("of the user"); }); }) ==
        "of the user");

  Run warmed;
  warmed.counts->throws = true;
  CHECK(message_of([&] {
          warmed.session->prewarm([&] { return warmed.model->forward(torch::ones({4, 3})).mean(); });
        }) == kSays);
  warmed.require_ended();

  Run validated;
  validated.session->use(Validation(ValidationOptions(1), [&] {
    validated.counts->throws = true;
    return 1.0;
  }));
  CHECK(contains(message_of([&] { validated.step(); }), kSays));
  validated.require_ended();
}

TEST_CASE(
    "what a hook throws behind a forward pass of a pipeline comes out of its step, of which all ranks hear",
    "[pipeline][hooks][errors]") {
  for (const int thrower : {0, 1}) {
    for (const bool evaluates : {false, true}) {
      CAPTURE(thrower, evaluates);
      const auto worlds =
          Communicator::in_process(2, CommunicatorOptions().timeout(std::chrono::seconds(20)));
      std::vector<pipelines::LanguageModel> models = {pipelines::make_model({}), pipelines::make_model({})};
      const auto messages = run_ranks(2, [&](int rank) {
        const auto at = static_cast<size_t>(rank);
        const auto counts = std::make_shared<Counts>();
        pipelines::Setup setup;
        setup.use = [&](Session& session, pipelines::LanguageModel&) {
          session.use(Thrower(counts)).use(Counter(counts));
        };
        pipelines::PipelineRank own(setup, one_f_one_b(4), 2, worlds[at], models[at]);
        own.step(0);
        counts->throws = rank == thrower;
        if (evaluates) {
          own.evaluate();
        } else {
          own.step(1);
        }
      });
      for (size_t rank = 0; rank < messages.size(); ++rank) {
        INFO(messages[rank]);
        // An evaluation may have ended on the other rank before.
        const bool may_have_ended = evaluates && rank != static_cast<size_t>(thrower);
        CHECK((contains(messages[rank], kSays) || (may_have_ended && messages[rank] == "")));
      }
    }
  }
}

}  // namespace pacer::testing::forward_end_fails
