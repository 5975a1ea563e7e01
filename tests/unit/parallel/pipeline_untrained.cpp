// Pipelines some of whose ranks have nothing to train, or no blocks: they train as one process does.
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/optim/adamw.h>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/message_of.h"
#include "support/parallel/pipeline_runs.h"

namespace pacer::testing::pipelines {
namespace {

// Leaves only these to train, by the beginning of their names.
std::function<void(LanguageModel&)> only(std::vector<std::string> beginnings) {
  return [=](LanguageModel& model) {
    for (const auto& item : model->named_parameters()) {
      bool trains = false;
      for (const std::string& beginning : beginnings) trains = trains || item.key().rfind(beginning, 0) == 0;
      Tensor(item.value()).set_requires_grad(trains);
    }
  };
}

struct Case {
  std::string name;
  std::function<void(LanguageModel&)> prepare;
  std::vector<int64_t> cut;  // of 6 blocks
};

std::vector<Case> cases() {
  const auto all = [](LanguageModel&) {};
  return {
      {"the lower half is frozen", only({"blocks.3", "blocks.4", "blocks.5", "norm", "head"}), {0, 3, 6}},
      {"only a layer of the last block is trained", only({"blocks.5.mix"}), {0, 3, 6}},
      {"only the embedding is trained", only({"embedding"}), {0, 3, 6}},
      {"only the stage in the middle is trained", only({"blocks.2"}), {0, 2, 4, 6}},
      {"the stage in the middle is empty", all, {0, 3, 3, 6}},
      {"the stage in the middle is empty, and the first frozen", only({"blocks.4", "head"}), {0, 3, 3, 6}},
  };
}

Setup setup_of(const Case& of) {
  Setup setup;
  setup.steps = 2;
  setup.prepare = of.prepare;
  setup.options.cut(of.cut);
  return setup;
}

int stages_of(const Case& of) { return static_cast<int>(of.cut.size()) - 1; }

void require_near(const Result& whole, const Result& piped) {
  REQUIRE(whole.weights.size() == piped.weights.size());
  for (const auto& [name, weight] : piped.weights) {
    INFO(name);
    REQUIRE(torch::allclose(weight, whole.weights.at(name), 1e-5, 1e-6));
  }
}

}  // namespace

TEST_CASE("ranks of a pipeline with nothing to train pass gradients on, to the bit", "[pipeline]") {
  for (const Case& of : cases()) {
    Setup setup = setup_of(of);
    const Result whole = run_whole(setup);
    for (const auto& schedule : {gpipe(4), one_f_one_b(4), zero_bubble(4)}) {
      INFO(of.name << ", " << schedule_name(schedule.order));
      require_same(whole, run_piped(setup, schedule, stages_of(of)));
    }
  }
}

TEST_CASE("ranks with nothing to train take part in the look at all gradients, and have replicas",
          "[pipeline]") {
  const auto torchs = [](const NamedParameters& parameters) -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<torch::optim::AdamW>(parameters.values(), torch::optim::AdamWOptions(0.01));
  };
  for (const Case& of : cases()) {
    for (const bool is_torchs : {false, true}) {
      Setup setup = setup_of(of);
      if (is_torchs) setup.optimizer = torchs;
      setup.use = [](Session& session, LanguageModel&) { session.use(GradientClipping(0.05)); };
      INFO(of.name << (is_torchs ? ", torch's" : ""));
      require_near(run_whole(setup), run_piped(setup, one_f_one_b(4), stages_of(of)));
      require_near(run_whole(setup, 2), run_piped(setup, one_f_one_b(4), stages_of(of), 2));
    }
  }
}

namespace {

// What two ranks hear that train a pipeline of 4 blocks with a block function of their own.
std::vector<std::string> heard(const std::function<void(LanguageModel&)>& prepare,
                               const std::function<Tensor(LanguageModel&, size_t, Tensor)>& block) {
  const auto worlds = Communicator::in_process(2, CommunicatorOptions().timeout(std::chrono::seconds(20)));
  Setup setup;
  setup.depth = 4;
  setup.prepare = prepare;
  std::vector<LanguageModel> models = {make_model(setup), make_model(setup)};
  return run_ranks(2, [&](int rank) {
    LanguageModel& model = models[static_cast<size_t>(rank)];
    const auto& world = worlds[static_cast<size_t>(rank)];
    Pipeline pipeline(
        *model, model->blocks, [&](size_t i, Tensor x) { return block(model, i, std::move(x)); },
        Grid(world, 2), one_f_one_b(2), setup.options);
    FusedAdamW optimizer(pipeline.named_parameters(), FusedAdamWOptions(0.01));
    Session session(*model, optimizer, world);
    session.use(pipeline);
    const auto [x, y] = batch_of(4, 0);
    (void)pipeline.step(
        session, x, y, [&](Tensor tokens) { return model->embed(tokens); },
        [&](Tensor h, Tensor targets) { return model->loss(h, targets); });
    session.step();
  });
}

}  // namespace

TEST_CASE("a block that writes to what another stage sent is named, with the remedy",
          "[pipeline][mistakes]") {
  const auto messages = heard([](LanguageModel&) {},
                              [](LanguageModel& model, size_t i, Tensor x) {
                                if (i == 2) x.add_(1);
                                return model->blocks->run(i, &BlockImpl::forward, x);
                              });
  REQUIRE(messages[1].rfind("block 2 writes in place to its input, with which stage 1 of the pipeline begins",
                            0) == 0);
  REQUIRE(messages[1].find("x = x.clone()") != std::string::npos);
  REQUIRE(messages[0].find("rank 1 left: backward failed: block 2 writes in place") != std::string::npos);
  // A write to a parameter has words of LibTorch's own.
  const auto others = heard([](LanguageModel&) {},
                            [](LanguageModel& model, size_t i, const Tensor& x) {
                              if (i == 1) model->blocks->at<BlockImpl>(1).up->bias.add_(1);
                              return model->blocks->run(i, &BlockImpl::forward, x);
                            });
  REQUIRE(others[0].find("leaf Variable that requires grad") != std::string::npos);
}

TEST_CASE("a stage that does not read what the one before has sent gives it gradients of zero",
          "[pipeline]") {
  const auto messages =
      heard([](LanguageModel&) {},
            [](LanguageModel& model, size_t i, const Tensor& x) {
              return model->blocks->run(i, &BlockImpl::forward, i == 2 ? torch::ones_like(x) : x);
            });
  REQUIRE(first_of(messages) == "");
}

TEST_CASE("a layer that is unfrozen between two steps learns from all replicas of a pipeline", "[pipeline]") {
  constexpr int kRanks = 4;
  const auto worlds =
      Communicator::in_process(kRanks, CommunicatorOptions().timeout(std::chrono::seconds(20)));
  Setup setup;
  setup.prepare = only({"blocks.0", "head"});
  std::vector<LanguageModel> models;
  for (int r = 0; r < kRanks; ++r) models.push_back(make_model(setup));
  std::vector<std::map<std::string, Tensor>> weights(kRanks);
  const auto messages = run_ranks(kRanks, [&](int r) {
    const auto at = static_cast<size_t>(r);
    PipelineRank rank(setup, one_f_one_b(4), 2, worlds[at], models[at]);
    rank.step(0);
    const auto before = rank.weights();
    only({"blocks.1", "blocks.4", "head"})(models[at]);
    for (int64_t step = 1; step < 3; ++step) rank.step(step);
    weights[at] = rank.weights();
    for (const std::string name : {"blocks.1.up.weight", "blocks.4.up.weight"}) {
      if (before.count(name) != 0) require(!before.at(name).equal(weights[at].at(name)), name, " stayed");
    }
    rank.session->finish();
  });
  REQUIRE(first_of(messages) == "");
  for (const size_t first : {0, 2}) REQUIRE(difference(weights[first], weights[first + 1]) == "");
}

TEST_CASE("a Pipeline of another model than the Session's is refused", "[pipeline][mistakes]") {
  const auto world = Communicator::alone(at::kCPU);
  LanguageModel model = make_model(Setup()), other = make_model(Setup());
  Pipeline pipeline(*model, model->blocks, &BlockImpl::forward, Grid(world, 1), one_f_one_b(2),
                    Setup().options);
  FusedAdamW optimizer(other->named_parameters(), FusedAdamWOptions(0.01));
  Session session(*other, optimizer, world);
  REQUIRE(message_of([&] { session.use(pipeline); }).find("another model than the Session's") !=
          std::string::npos);
}

TEST_CASE("a pipeline that trains nothing at all is refused on all ranks", "[pipeline][mistakes]") {
  const auto messages = heard(only({}), [](LanguageModel& model, size_t i, const Tensor& x) {
    return model->blocks->run(i, &BlockImpl::forward, x);
  });
  for (const std::string& message : messages) {
    REQUIRE(message.find("no parameter that the ranks of the pipeline update needs a gradient") !=
            std::string::npos);
  }
}

}  // namespace pacer::testing::pipelines
