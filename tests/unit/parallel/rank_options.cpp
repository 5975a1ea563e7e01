// What ranks compare of hooks and buffers: options that differ, however little, and buffers that begin to
// change long after the first step.
#include <functional>

#include <torch/nn/modules/batchnorm.h>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/parallel/rank_trainers.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

using Use = std::function<void(Session&)>;

struct Options {
  const char* name;
  Use first, second;  // on rank 0 and on rank 1
  std::vector<std::string> says;
};

Use clipping(double norm) {
  return [=](Session& s) { s.use(GradientClipping(norm)); };
}
Use lengths(const SequenceLengthOptions& options) {
  return [=](Session& s) { s.use(SequenceLength(options)); };
}
Use rate(const LearningRateSchedule& schedule) {
  return [=](Session& s) { s.use(LearningRate(schedule)); };
}
Use number(const VaryOptions& options, const LearningRateSchedule& schedule) {
  return [=](Session& s) { s.use(Vary(options, schedule)); };
}
Use called(double at_one) {
  return [=](Session& s) {
    s.use(Vary(VaryOptions("p").at_one(at_one).at_zero(0), constant_schedule(), [](double) {}));
  };
}
Use function(int64_t boundary) {
  return lengths(LengthSchedule(1, 4).difficulty_step(1).custom(
      [=](int64_t step) { return step < boundary ? int64_t{1} : int64_t{4}; }));
}

std::vector<Options> differing_options(const std::string& folder) {
  using Table = LengthSchedule::Table;
  const auto ramp = SequenceLengthOptions(1, 4).ramp_steps(5).difficulty_step(1);
  const auto saves = [=](int64_t every, int64_t keep) -> Use {
    return [=](Session& s) { s.use(Checkpoints(CheckpointsOptions(folder).every(every).keep(keep))); };
  };
  return {
      {"small norms", clipping(1e-7), clipping(2e-7), {"norm 1e-07", "norm 2e-07"}},
      {"norms that are nearly equal", clipping(1.0), clipping(1.0 + 1e-12), {"norm 1.000000000001"}},
      {"tables between powers of two",
       lengths(SequenceLengthOptions(1, 4).table(Table{{0, 1}, {1025, 4}})),
       lengths(SequenceLengthOptions(1, 4).table(Table{{0, 1}, {2000, 4}})),
       {"4 from 1025 steps on", "4 from 2000 steps on"}},
      {"functions between powers of two", function(1025), function(1026), {"checksum"}},
      {"roots", lengths(ramp), lengths(SequenceLengthOptions(ramp).root(2)), {"root 1", "root 2"}},
      {"dimensions",
       lengths(SequenceLengthOptions(ramp).dimensions({{1}})),
       lengths(SequenceLengthOptions(ramp).dimensions({{-1}})),
       {"dimensions {[1]}", "dimensions {[-1]}"}},
      {"shorter batches",
       lengths(ramp),
       lengths(SequenceLengthOptions(ramp).allow_shorter(true)),
       {"shorter"}},
      {"totals between powers of two",
       rate(warmup_cosine({1, 1'000'003})),
       rate(warmup_cosine({1, 1'000'033})),
       {"total_steps 1000003", "total_steps 1000033"}},
      {"end factors",
       rate(warmup_linear(LearningRateScheduleOptions(1, 10).end_factor(0.1))),
       rate(warmup_linear(LearningRateScheduleOptions(1, 10).end_factor(0.1000000001))),
       {"end_factor 0.1"}},
      {"ends of a number",
       number(VaryOptions("beta1").at_one(0.9).at_zero(0.8), constant_schedule()),
       number(VaryOptions("beta1").at_one(0.9).at_zero(0.8 + 1e-12), constant_schedule()),
       {"beta1, 0.9 at 1, 0.8 at 0 of", "0.800000000001 at 0 of"}},
      {"schedules of a number",
       number(VaryOptions("beta1").at_one(0.9).at_zero(0.8), constant_schedule({7})),
       number(VaryOptions("beta1").at_one(0.9).at_zero(0.8), constant_schedule({8})),
       {"warm-up of 7 steps", "warm-up of 8 steps"}},
      {"numbers of a function", called(0.5), called(0.25), {"p, given to a function, 0.5 at 1", "0.25 at 1"}},
      {"steps between checkpoints", saves(5, 3), saves(6, 3), {"every 5 steps", "every 6 steps"}},
      {"checkpoints that stay", saves(5, 3), saves(5, 2), {"newest 3 kept", "newest 2 kept"}},
  };
}

}  // namespace

TEST_CASE("hooks whose options differ between ranks are told apart, however little they differ",
          "[session][ranks]") {
  const TemporaryFolder folder;
  for (const Options& options : differing_options(folder.path("checkpoints"))) {
    INFO(options.name);
    RankSetup first, second;
    first.hooks = options.first;
    second.hooks = options.second;
    auto trainers = trainers_of({first, second});
    for (const std::string& message : run_all(trainers, [](RankTrainer&t, int) { t.begin_and_backward(); })) {
      for (const std::string& part : options.says) CHECK(contains(message, part));
    }
    auto alike = trainers_of({second, second});
    CHECK(first_of(run_all(alike, [](RankTrainer& t, int) {
            auto [x] = t.session->begin(t.inputs);
            if (t.parts->find<SequenceLength>() == nullptr) t.session->backward(t.model->forward(x).mean());
          })) == "");
  }
}

TEST_CASE("ranks compare where their parameters come from", "[session][ranks]") {
  RankSetup first, second;
  second.data_parallel.initial_parameters(InitialParameters::check);
  auto trainers = trainers_of({first, second});
  for (const std::string& message : run_all(trainers, [](RankTrainer&t, int) { t.begin_and_backward(); })) {
    CHECK(contains(message, "initial parameters are rank 0's"));
    CHECK(contains(message, "initial parameters are compared"));
  }
}

TEST_CASE("what all ranks freeze and unfreeze between steps stays the same on all", "[session][ranks]") {
  auto trainers = trainers_of(std::vector<RankSetup>(2));
  std::vector<std::vector<Tensor>> before(2), frozen(2), after(2);
  const auto messages = run_all(trainers, [&](RankTrainer& t, int rank) {
    const auto r = static_cast<size_t>(rank);
    t.inputs.mul_(1 + rank);
    t.step();
    before[r] = t.snapshot();
    t.model->parameters().front().requires_grad_(false);
    t.step();
    t.step();
    frozen[r] = t.snapshot();
    t.model->parameters().front().requires_grad_(true);
    t.step();
    after[r] = t.snapshot();
  });
  REQUIRE(first_of(messages) == "");
  for (size_t i = 0; i < after[0].size(); ++i) {
    CHECK(after[0][i].equal(after[1][i]));
    CHECK(before[0][i].equal(frozen[0][i]) == (i == 0));
    CHECK_FALSE(frozen[0][i].equal(after[0][i]));
  }
}

TEST_CASE("running statistics that training changes late are rank 0's on all ranks from then on",
          "[session][ranks]") {
  for (const int late_rank : {-1, 1}) {  // both, or rank 1 alone
    INFO(late_rank);
    const Ranks world = Communicator::in_process(2);
    std::vector<torch::nn::BatchNorm1d> models;
    for (int rank = 0; rank < 2; ++rank) {
      models.emplace_back(3);
      models.back()->register_buffer("constant", torch::ones({2}));
    }
    std::vector<int64_t> broadcasts(2);
    REQUIRE(first_of(run_ranks(2, [&](int rank) {
              const auto r = static_cast<size_t>(rank);
              auto& model = models[r];
              FusedAdamW optimizer(model->parameters());
              Session session(*model, optimizer, world[r]);
              for (int step = 0; step < 6; ++step) {
                const bool frozen = step < 3 || (late_rank >= 0 && rank != late_rank);
                model->train(!frozen);
                auto [x] = session.begin(torch::arange(12.0).view({4, 3}) * (rank + 1));
                session.backward(model->forward(x).square().sum());
                session.step();
                if (step == 2) broadcasts[r] = traffic_of(*world[r], "broadcast").calls;
              }
              session.finish();
              broadcasts[r] = traffic_of(*world[r], "broadcast").calls - broadcasts[r];
            })) == "");
    CHECK(same_bits(models[0]->running_mean, models[1]->running_mean));
    CHECK(same_bits(models[0]->running_var, models[1]->running_var));
    CHECK(broadcasts[0] > 0);
    // Rank 1's own statistics, which it computed alone, went.
    CHECK(models[0]->running_mean.eq(0).all().item<bool>() == (late_rank == 1));
  }
}

}  // namespace pacer::testing
