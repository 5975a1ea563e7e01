// Parameters that backward does not reach: one rule for any number of ranks and for pipelines. By default an
// error; with unused_is_zero what no rank has used sits the step out, and what one has used gets the mean.
#include <torch/csrc/autograd/autograd.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/parallel/pipeline_runs.h"
#include "support/parallel/rank_trainers.h"
#include "support/session/mistakes_trainer.h"

namespace pacer::testing::unused {
namespace {

enum class Uses { both, first_layer };

void micro_step(RankTrainer& t, Uses uses) {
  auto [x] = t.session->begin(t.inputs);
  const Tensor h = t.model->children().front()->as<torch::nn::Linear>()->forward(x);
  const Tensor y = uses == Uses::both ? t.model->forward(x) : h;
  t.session->backward(y.square().mean());
  t.session->step();
}

RankSetup setup_with(const DataParallelOptions& options, int64_t micro_steps = 1) {
  RankSetup setup;
  setup.options.weight_decay(0.3);
  setup.data_parallel = options;
  setup.hooks = [micro_steps](Session& session) { session.use(GradientAccumulation(micro_steps)); };
  return setup;
}

// What ranks have after these micro-steps, alike on all; `odd`: those of rank 0 where they are others.
struct Outcome {
  std::vector<Tensor> weights;
  std::vector<std::string> messages;
};
Outcome trained(int ranks, const RankSetup& setup, const std::vector<Uses>& uses,
                const std::vector<Uses>& odd = {}) {
  auto trainers = trainers_of(std::vector<RankSetup>(static_cast<size_t>(ranks), setup));
  Outcome outcome;
  outcome.messages = run_all(trainers, [&](RankTrainer& t, int rank) {
    for (const Uses one : rank == 0 && !odd.empty() ? odd : uses) micro_step(t, one);
    t.session->finish();
  });
  outcome.weights = trainers.front()->snapshot();
  for (const auto& trainer : trainers) {
    if (first_of(outcome.messages).empty()) CHECK(same_bits(outcome.weights, trainer->snapshot()));
  }
  return outcome;
}

// With unused_is_zero.
std::vector<RankSetup> reductions(int64_t micro_steps = 1) {
  const auto options = [] { return DataParallelOptions().unused_is_zero(true); };
  std::vector<RankSetup> setups;
  for (const auto& one :
       {options(), options().bucket_bytes(1).first_bucket_bytes(1), options().in_place(true)}) {
    setups.push_back(setup_with(one, micro_steps));
  }
  for (const Sharded what : {Sharded::state, Sharded::gradients}) {
    setups.push_back(setup_with({}, micro_steps));
    setups.back().reduction = [what](Session& session) {
      session.use(Shards(ShardsOptions().what(what).unused_is_zero(true)));
    };
  }
  return setups;
}

constexpr Uses kBoth = Uses::both, kFirst = Uses::first_layer;

}  // namespace

TEST_CASE("a parameter that no rank has used sits the step out, on any number of ranks",
          "[session][data_parallel]") {
  for (const int64_t micro_steps : {1, 2}) {
    for (const RankSetup& setup : reductions(micro_steps)) {
      const std::vector<Uses> before = {kBoth, kBoth};
      std::vector<Uses> with = before;
      for (int i = 0; i < 4; ++i) with.push_back(kFirst);
      const Outcome alone = trained(1, setup, with), then = trained(1, setup, before);
      REQUIRE(first_of(alone.messages) == "");
      CHECK_FALSE(same_bits(alone.weights[0], then.weights[0]));
      for (size_t i : {2, 3}) CHECK(same_bits(alone.weights[i], then.weights[i]));
      for (const int ranks : {2, 4}) {
        const Outcome several = trained(ranks, setup, with);
        CHECK(first_of(several.messages) == "");
        CHECK(same_bits(several.weights, alone.weights));
      }
    }
  }
}

TEST_CASE("a parameter that one rank has used gets the mean with zeros", "[session][data_parallel]") {
  for (const RankSetup& setup : reductions()) {
    auto trainers = trainers_of({setup, setup});
    const auto messages = run_all(trainers, [&](RankTrainer& t, int rank) {
      micro_step(t, kBoth);
      const Tensor weight = t.model->parameters()[2];
      const Tensor before = state_of(*t.optimizer, weight).exp_avg().clone();
      // What rank 0 alone has of it.
      const Tensor own =
          torch::autograd::grad({t.model->forward(t.inputs).square().mean()}, {weight}).front();
      micro_step(t, rank == 0 ? kBoth : kFirst);
      // Of all of it, or of what of it is this rank's part.
      const Tensor mean = (state_of(*t.optimizer, weight).exp_avg() - before * 0.9).flatten() / 0.1;
      const int64_t first = rank == 0 ? 0 : own.numel() - mean.numel();
      RANK_REQUIRE(mean.allclose(own.flatten().narrow(0, first, mean.numel()) / 2, 1e-4, 1e-6));
      t.session->finish();
    });
    CHECK(first_of(messages) == "");
    CHECK(same_bits(trainers[0]->snapshot(), trainers[1]->snapshot()));
  }
}

TEST_CASE("without unused_is_zero it is an error on any number of ranks", "[session][data_parallel]") {
  const std::vector<std::function<void(Session&)>> reductions = {
      nullptr, [](Session&) {}, [](Session& session) { session.use(Shards()); },
      [](Session& session) { session.use(Shards(ShardsOptions().what(Sharded::state))); }};
  for (const int ranks : {1, 2}) {
    for (const auto& reduction : reductions) {
      CAPTURE(ranks);
      RankSetup setup = setup_with(DataParallelOptions());
      setup.reduction = reduction;
      for (const std::string& message : trained(ranks, setup, {kBoth, kFirst}).messages) {
        CHECK(contains(message, "1.weight"));
        CHECK(contains(message, "unused_is_zero(true)"));
      }
      // Also where one rank alone leaves it out.
      if (ranks > 1) {
        for (const std::string& message : trained(ranks, setup, {kBoth, kBoth}, {kBoth, kFirst}).messages) {
          CHECK(contains(message, "1.weight"));
          CHECK(contains(message, "unused_is_zero(true)"));
        }
      }
      // Also where the window ends early.
      RankSetup windows = setup_with(DataParallelOptions(), 2);
      windows.reduction = reduction;
      for (const std::string& message : trained(ranks, windows, {kBoth, kBoth, kFirst}).messages) {
        CHECK(contains(message, "1.weight"));
      }
      // But not what an earlier micro-step has used.
      CHECK(first_of(trained(ranks, windows, {kBoth, kFirst, kFirst, kBoth}).messages) == "");
    }
  }
}

TEST_CASE("a Session without ranks leaves it to the optimizer, as a bare loop does", "[session]") {
  torch::nn::Linear used(3, 2), other(3, 2);
  torch::nn::Sequential model(used, other);
  FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.1).weight_decay(0.3));
  const Tensor before = other->weight.detach().clone();
  Session session(*model, optimizer);
  auto [x] = session.begin(torch::ones({4, 3}));
  session.backward(used->forward(x).square().mean());
  session.step();
  session.finish();
  CHECK(other->weight.equal(before));
}

TEST_CASE("pipelines have the same rule, whether stages have replicas or not", "[pipeline]") {
  for (const int replicas : {1, 2}) {
    for (const bool unused_is_zero : {true, false}) {
      CAPTURE(replicas, unused_is_zero);
      pipelines::Setup setup;
      setup.options.last({"norm", "head", "spare"}).unused_is_zero(unused_is_zero);
      setup.optimizer = [](NamedParameters parameters) {
        return std::make_unique<FusedAdamW>(std::move(parameters), FusedAdamWOptions(0.01).weight_decay(0.3));
      };
      const int ranks = 2 * replicas;
      const auto worlds = Communicator::in_process(ranks, CommunicatorOptions().timeout(setup.timeout));
      std::vector<pipelines::LanguageModel> models;
      for (int r = 0; r < ranks; ++r) {
        models.push_back(pipelines::make_model(setup));
        models.back()->register_parameter("spare", torch::ones({3}));
      }
      const auto messages = run_ranks(ranks, [&](int r) {
        const auto at = static_cast<size_t>(r);
        pipelines::PipelineRank rank(setup, one_f_one_b(4), 2, worlds[at], models[at]);
        for (int64_t step = 0; step < 3; ++step) rank.step(step);
        const auto weights = rank.weights();
        if (weights.count("spare") != 0) RANK_REQUIRE(weights.at("spare").equal(torch::ones({3})));
        rank.session->finish();
      });
      if (unused_is_zero) {
        CHECK(first_of(messages) == "");
      } else {
        CHECK(contains(messages.back(), "spare"));
        CHECK(contains(messages.back(), "unused_is_zero(true)"));
      }
    }
  }
}

TEST_CASE("a stage none of whose trained parameters was reached sits the step out", "[pipeline]") {
  for (const int replicas : {1, 2}) {
    for (const bool clears : {false, true}) {
      CAPTURE(replicas, clears);
      pipelines::Setup setup;
      setup.options.last({"norm", "head", "spare"}).unused_is_zero(true);
      setup.prepare = [](pipelines::LanguageModel& model) {
        model->register_parameter("spare", torch::ones({3}));
        for (const auto& item : model->named_parameters()) {
          const bool trains = item.key() == "spare" || item.key().rfind("blocks.0.", 0) == 0;
          Tensor(item.value()).requires_grad_(trains);
        }
      };
      const int ranks = 2 * replicas;
      const auto worlds = Communicator::in_process(ranks, CommunicatorOptions().timeout(setup.timeout));
      std::vector<pipelines::LanguageModel> models;
      for (int r = 0; r < ranks; ++r) models.push_back(pipelines::make_model(setup));
      const auto messages = run_ranks(ranks, [&](int r) {
        const auto at = static_cast<size_t>(r);
        pipelines::PipelineRank rank(setup, one_f_one_b(4), 2, worlds[at], models[at]);
        const auto before = rank.weights();
        for (int64_t step = 0; step < 3; ++step) {
          const auto [x, y] = rank.batch(step);
          (void)rank.pass(x, y);
          if (clears) rank.optimizer->zero_grad();
          rank.session->step();
        }
        const auto after = rank.weights();
        if (after.count("spare") != 0) RANK_REQUIRE(after.at("spare").equal(torch::ones({3})));
        const std::string trained = "blocks.0.mix.weight";
        if (after.count(trained) != 0) RANK_REQUIRE(!after.at(trained).equal(before.at(trained)));
        rank.session->finish();
      });
      if (!clears) {
        CHECK(first_of(messages) == "");
      } else {  // which is no reason to sit out
        CHECK(contains(messages.front(), replicas == 1 ? "delete zero_grad()" : "gradient"));
      }
    }
  }
}

TEST_CASE("parameters that join between backward and step sit this step out, on any number of ranks",
          "[session][data_parallel]") {
  const CapturedStderr quiet;  // the Session warns of a parameter that is not the model's
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    RankSetup setup = setup_with(DataParallelOptions());
    setup.frozen = true;
    auto trainers = trainers_of(std::vector<RankSetup>(static_cast<size_t>(ranks), setup));
    const auto messages = run_all(trainers, [&](RankTrainer& t, int) {
      const Tensor added = torch::ones({3}).requires_grad_(), thawed = t.model->parameters().front();
      const Tensor before = thawed.detach().clone();
      t.step();
      t.begin_and_backward();
      t.optimizer->add_param_group(torch::optim::OptimizerParamGroup(std::vector<Tensor>{added}));
      thawed.requires_grad_(true);
      RANK_REQUIRE(t.session->step());
      RANK_REQUIRE(added.equal(torch::ones({3})) && thawed.equal(before));
      auto [x] = t.session->begin(t.inputs);
      t.session->backward(t.model->forward(x).square().mean() + added.sum());
      RANK_REQUIRE(t.session->step());
      RANK_REQUIRE(!added.equal(torch::ones({3})) && !thawed.equal(before));
      t.session->finish();
    });
    CHECK(first_of(messages) == "");
  }
}

TEST_CASE("after a backward that missed a parameter a single rank goes on as it began",
          "[session][data_parallel]") {
  RankSetup setup = setup_with(DataParallelOptions(), 2);
  auto trainers = trainers_of({setup});
  RankTrainer& t = *trainers.front();
  micro_step(t, kFirst);
  CHECK(contains(refusal([&] { micro_step(t, kFirst); }), "backward reached 2 of 4 parameters not at all"));
  CHECK(t.session->progress().micro_step == 0);
  for (const Uses uses : {kBoth, kFirst}) micro_step(t, uses);
  CHECK(t.session->progress().step == 1);
}

TEST_CASE("ranks with an unequal number of batches hear so where Shards lets parameters sit out",
          "[session][shards]") {
  for (const Sharded what : {Sharded::state, Sharded::gradients}) {
    for (const int64_t micro_steps : {1, 2}) {
      CAPTURE(static_cast<int>(what), micro_steps);
      RankSetup setup = setup_with({}, micro_steps);
      setup.reduction = [what](Session& session) {
        session.use(Shards(ShardsOptions().what(what).unused_is_zero(true)));
      };
      auto trainers = trainers_of({setup, setup}, CommunicatorOptions().timeout(std::chrono::seconds(20)));
      const auto messages = run_all(trainers, [&](RankTrainer& t, int rank) {
        t.step();
        if (rank == 0) micro_step(t, kBoth);  // with two micro-steps, of a window that ends early
        t.session->finish();
      });
      for (const std::string& message : messages) {
        CHECK(contains(message, "the ranks are out of step"));
        CHECK(contains(message, "give every rank the same number of batches"));
      }
    }
  }
}

}  // namespace pacer::testing::unused
