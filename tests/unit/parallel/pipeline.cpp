// Pipelines of threads as ranks against one rank with the whole model: gradients and weights to the bit.
#include <pacer/parallel/pipeline.h>

#include <limits>
#include <string>

#include <torch/optim/sgd.h>

#include "support/parallel/pipeline_runs.h"

namespace pacer::testing::pipelines {
namespace {

struct Schedule {
  const char* name;
  std::function<PipelineSchedule(int64_t)> make;
  int64_t chunks = 1;
};
const std::vector<Schedule> kSchedules = {
    {"gpipe", gpipe},
    {"1f1b", one_f_one_b},
    {"zero bubble", zero_bubble},
    {"interleaved", [](int64_t m) { return interleaved(m, 2); }, 2},
};

}  // namespace

TEST_CASE("a pipeline has the gradients of the whole model, to the bit", "[pipeline]") {
  for (const int64_t micro_batches : {1, 3, 8}) {
    Setup setup;
    setup.micro_batches = micro_batches;
    const Result whole = run_whole(setup);
    for (const Schedule& schedule : kSchedules) {
      for (const int stages : {1, 2, 3}) {
        if (schedule.chunks > 1 && micro_batches % stages != 0) continue;
        INFO(schedule.name << ", " << stages << " stages, " << micro_batches << " micro-batches");
        const Result piped = run_piped(setup, schedule.make(micro_batches), stages);
        require_same(whole, piped);
        for (size_t i = 0; i < whole.losses.size(); ++i) {
          REQUIRE(piped.losses[i] == Catch::Approx(whole.losses[i]).epsilon(1e-6));
        }
        REQUIRE(piped.evaluated == Catch::Approx(whole.evaluated).epsilon(1e-6));
      }
    }
  }
}

TEST_CASE("hooks act on a pipeline as on the whole model, to the bit", "[pipeline]") {
  struct Row {
    const char* name;
    std::function<void(Session&, LanguageModel&)> use;
  };
  const std::vector<Row> table = {
      {"recomputed", [](Session& s, LanguageModel& m) { s.use(Recompute(m->blocks)); }},
      {"layers dropped, recomputed",
       [](Session& s, LanguageModel& m) {
         s.use(LayerDrop(m->blocks, LayerDropOptions().theta_bar(0.3).gamma(1).seed(3)));
         s.use(Recompute(m->blocks));
       }},
      {"layers dropped, recomputed but for products",
       [](Session& s, LanguageModel& m) {
         s.use(LayerDrop(m->blocks, LayerDropOptions().theta_bar(0.3).gamma(1).seed(3)));
         s.use(Recompute(m->blocks, RecomputeOptions().keep(KeptOperators::products())));
       }},
      {"length grows",
       [](Session& s, LanguageModel&) {
         s.use(SequenceLength(SequenceLengthOptions(4, 12).ramp_steps(3).difficulty_step(2)));
       }},
      {"learning rate",
       [](Session& s, LanguageModel&) {
         s.use(LearningRate(warmup_cosine({2, 10})));
       }},
      {"numbers that move",
       [](Session& s, LanguageModel& m) {
         s.use(Vary(VaryOptions("weight_decay").at_one(0.5).at_zero(0.1), warmup_linear({1, 4})));
         s.use(Vary(VaryOptions("epsilon").at_one(1e-5).at_zero(0.5), warmup_linear({1, 4}),
                    [model = m.ptr()](double epsilon) {
                      for (const auto& module : model->modules()) {
                        if (auto* norm = module->as<torch::nn::LayerNorm>()) norm->options.eps(epsilon);
                      }
                    }));
       }},
      {"average of weights",
       [](Session& s, LanguageModel&) { s.use(WeightAverage(ema(0.7).warm_up(true).every(2))); }},
      {"validation",
       [](Session& s, LanguageModel&) { s.use(Validation(ValidationOptions(1), [] { return 1.0; })); }},
  };
  for (const Row& row : table) {
    Setup setup;
    setup.steps = 4;
    setup.rows = 4;
    setup.use = row.use;
    const Result whole = run_whole(setup);
    for (const Schedule& schedule : kSchedules) {
      INFO(row.name << ", " << schedule.name);
      const Result piped = run_piped(setup, schedule.make(setup.micro_batches), 2);
      require_same(whole, piped);
      for (size_t i = 0; i < whole.losses.size(); ++i) {
        REQUIRE(piped.losses[i] == Catch::Approx(whole.losses[i]).epsilon(1e-6));
      }
      REQUIRE(piped.evaluated == Catch::Approx(whole.evaluated).epsilon(1e-6));
    }
  }
}

// Norms add up stage by stage, so that the clipping factor may round otherwise.
TEST_CASE("a pipeline clips by the norm of the whole model", "[pipeline]") {
  Setup setup;
  setup.use = [](Session& session, LanguageModel&) { session.use(GradientClipping(0.05)); };
  const std::vector<std::pair<const char*, decltype(setup.optimizer)>> optimizers = {
      {"FusedAdamW", setup.optimizer},
      {"FusedLamb",
       [](NamedParameters parameters) {
         return std::make_unique<FusedLamb>(std::move(parameters), FusedLambOptions(0.01));
       }},
      {"FusedSgd",
       [](NamedParameters parameters) {
         return std::make_unique<FusedSgd>(std::move(parameters), FusedSgdOptions(0.1).momentum(0.9));
       }},
      {"FusedRmsprop",
       [](NamedParameters parameters) {
         return std::make_unique<FusedRmsprop>(std::move(parameters),
                                               FusedRmspropOptions(0.01).centered(true));
       }},
      {"torch's SGD",
       [](NamedParameters parameters) {
         return std::make_unique<torch::optim::SGD>(parameters.values(), torch::optim::SGDOptions(0.1));
       }},
  };
  for (const auto& [name, optimizer] : optimizers) {
    setup.optimizer = optimizer;
    const Result whole = run_whole(setup);
    for (const Schedule& schedule : kSchedules) {
      INFO(name << ", " << schedule.name);
      const Result piped = run_piped(setup, schedule.make(setup.micro_batches), 2);
      REQUIRE(whole.weights.size() == piped.weights.size());
      for (const auto& [parameter, weight] : whole.weights) {
        INFO(parameter);
        REQUIRE(torch::allclose(weight, piped.weights.at(parameter), 0, 1e-6));
      }
    }
  }
}

TEST_CASE("pipelines beside each other add their gradients as replicas do", "[pipeline]") {
  Setup setup;
  for (const bool by_tokens : {false, true}) {
    setup.options.weight_by_tokens(by_tokens);
    const Result whole = run_whole(setup, 2);
    for (const Schedule& schedule : kSchedules) {
      INFO(schedule.name << (by_tokens ? ", by tokens" : ""));
      require_same(whole, run_piped(setup, schedule.make(setup.micro_batches), 2, 2));
    }
  }
}

TEST_CASE("a batch of any number of rows is cut into micro-batches that count by their tokens",
          "[pipeline]") {
  Setup setup;
  setup.options.weight_by_tokens(true);
  for (const int64_t left : {1, 3}) {
    setup.rows_left = left;
    const Result whole = run_whole(setup);
    for (const Schedule& schedule : kSchedules) {
      INFO(schedule.name << ", " << left << " rows left");
      const Result piped = run_piped(setup, schedule.make(setup.micro_batches), 2);
      require_same(whole, piped);
      CHECK(piped.losses.front() == Catch::Approx(whole.losses.front()).epsilon(1e-6));
      CHECK(piped.evaluated == Catch::Approx(whole.evaluated).epsilon(1e-6));
    }
  }
}

// Gradients of a tied parameter are added up rank by rank, those of the whole model micro-batch by
// micro-batch.
TEST_CASE("a parameter of the first and the last stage stays one", "[pipeline]") {
  Setup setup;
  setup.is_tied = true;
  setup.options.last({"norm", "embedding"});
  const Result whole = run_whole(setup);
  for (const Schedule& schedule : kSchedules) {
    INFO(schedule.name);
    const Result piped = run_piped(setup, schedule.make(setup.micro_batches), 2);
    for (const auto& [name, gradient] : piped.gradients[0]) {
      INFO(name);
      const bool is_tied = name == "embedding.weight";
      REQUIRE(torch::allclose(gradient, whole.gradients[0].at(name), is_tied ? 1e-5 : 0, is_tied ? 1e-7 : 0));
    }
    for (const auto& [name, weight] : piped.weights) {
      INFO(name);
      REQUIRE(torch::allclose(weight, whole.weights.at(name), 1e-4, 1e-5));
    }
    REQUIRE(piped.evaluated == Catch::Approx(whole.evaluated).epsilon(1e-5));
  }
}

TEST_CASE("stages are cut by hand, and may be empty", "[pipeline]") {
  Setup setup;
  const Result whole = run_whole(setup);
  for (const std::vector<int64_t>& cut : std::vector<std::vector<int64_t>>{{0, 1, 6}, {0, 0, 6}, {0, 6, 6}}) {
    setup.options.cut(cut);
    for (const auto& schedule : {gpipe(4), one_f_one_b(4), zero_bubble(4)}) {
      INFO(at::IntArrayRef(cut) << ' ' << schedule_name(schedule.order));
      require_same(whole, run_piped(setup, schedule, 2));
    }
  }
}

TEST_CASE("a step whose gradients are not finite on one stage changes nothing on any", "[pipeline]") {
  class Spoiled : public Hook {
   public:
    explicit Spoiled(LanguageModel model) : model_(std::move(model)) {}
    std::string hook_name() const override { return "spoiled"; }
    Slot slot() const override { return Slot::clip; }
    void gradients_ready(const Progress& progress) override {
      const Tensor gradient = model_->blocks->at<BlockImpl>(0).up->weight.grad();
      if (progress.step == 1 && gradient.defined())
        gradient.view({-1})[3] = std::numeric_limits<float>::infinity();
    }

   private:
    LanguageModel model_;
  };
  Setup setup;
  setup.use = [](Session& session, LanguageModel& model) { session.use(Spoiled(model)); };
  const auto weights_after = [&](int64_t steps) {
    setup.steps = steps;
    auto weights = run_piped(setup, one_f_one_b(4), 3).weights;
    for (int i = 0; i < 6; ++i) weights.erase("blocks." + std::to_string(i) + ".running_mean");
    return weights;
  };
  REQUIRE(difference(weights_after(1), weights_after(2)) == "");
  REQUIRE(difference(weights_after(2), weights_after(3)) != "");
}

}  // namespace pacer::testing::pipelines
