// What happens when ranks are not alike: they differ from the start (F4), fall out of step, or leave a
// parameter unused. Always an error on every rank that names the culprit, never a hang.
#include <functional>

#include <torch/optim/sgd.h>

#include "support/catch.h"
#include "support/parallel/rank_trainers.h"

namespace pacer::testing {
namespace {

int64_t payload_bytes(const Communicator& world) {
  int64_t bytes = 0;
  for (const Traffic& entry : world.traffic()) {
    if (entry.operation != "agreement") bytes += entry.bytes_sent;
  }
  return bytes;
}

}  // namespace

TEST_CASE("F4: ranks that differ from the start are told what differs before a payload moves",
          "[session][data_parallel]") {
  struct Difference {
    std::string text;
    std::function<void(RankSetup&)> change;
  };
  const auto use = [](auto make) {
    return [make](RankSetup& s) { s.hooks = [make](Session& session) { session.use(make()); }; };
  };
  const std::vector<Difference> differences = {
      {"[7, 4]",
       [](RankSetup& s) {
         s.widths = {4, 7, 3};
       }},
      {"2.weight, Float [3, 3]",
       [](RankSetup& s) {
         s.widths = {4, 6, 3, 3};
       }},
      {"parameter 1", [](RankSetup& s) { s.bias = false; }},
      {"Double", [](RankSetup& s) { s.dtype = at::kDouble; }},
      {"1.bias", [](RankSetup& s) { s.reversed = true; }},
      {"parameter groups: 2", [](RankSetup& s) { s.two_groups = true; }},
      {"frozen", [](RankSetup& s) { s.frozen = true; }},
      {"beta1",
       [](RankSetup& s) {
         s.options.betas({0.8, 0.999});
       }},
      {"beta2",
       [](RankSetup& s) {
         s.options.betas({0.9, 0.99});
       }},
      {"eps", [](RankSetup& s) { s.options.eps(1e-7); }},
      {"weight_decay", [](RankSetup& s) { s.options.weight_decay(0.5); }},
      {"finite_check", [](RankSetup& s) { s.options.finite_check(true); }},
      {"gradient_clipping", use([] { return GradientClipping(1.0); })},
      {"micro-steps: 2", use([] { return GradientAccumulation(2); })},
      {"learning_rate", use([] {
         return LearningRate(warmup_cosine({3, 20}));
       })},
      {"buckets", [](RankSetup& s) { s.data_parallel.bucket_bytes(100); }},
      {"BFloat16", [](RankSetup& s) { s.data_parallel.wire_dtype(at::kBFloat16); }},
      {"are zero", [](RankSetup& s) { s.data_parallel.unused_is_zero(true); }},
      {"step 5", [](RankSetup& s) { s.first_step = 5; }},
  };
  for (const Difference& difference : differences) {
    for (const int odd : {0, 2}) {
      INFO(difference.text << ", rank " << odd);
      std::vector<RankSetup> setups(3);
      difference.change(setups[static_cast<size_t>(odd)]);
      auto trainers = trainers_of(setups);
      std::vector<std::vector<Tensor>> before;
      for (const auto& trainer : trainers) before.push_back(trainer->snapshot());
      const auto messages = run_all(trainers, [](RankTrainer& trainer, int) { trainer.step(); });
      for (const std::string& message : messages) {
        CHECK((contains(message, "the ranks disagree") || contains(message, "out of step")));
        CHECK(contains(message, difference.text));
      }
      for (size_t i = 0; i < trainers.size(); ++i) {
        CHECK(payload_bytes(trainers[i]->parts->world()) == 0);
        const auto after = trainers[i]->snapshot();
        for (size_t p = 0; p < after.size(); ++p) CHECK(after[p].equal(before[i][p]));
      }
    }
  }
}

TEST_CASE("hooks with other settings are found out, whatever the setting", "[session][data_parallel]") {
  const auto lengths = [](int64_t first) {
    return [first](Session& s) {
      s.use(SequenceLength(SequenceLengthOptions(first, 4).ramp_steps(9).difficulty_step(1)));
    };
  };
  const std::vector<std::pair<std::function<void(Session&)>, std::function<void(Session&)>>> pairs = {
      {[](Session& s) { s.use(GradientClipping(1)); }, [](Session& s) { s.use(GradientClipping(2)); }},
      {[](Session& s) { s.use(GradientClipping(1)); },
       [](Session& s) { s.use(GradientClipping(GradientClippingOptions(1).by_previous_norm(true))); }},
      {[](Session& s) {
         s.use(LearningRate(warmup_cosine({3, 20})));
       },
       [](Session& s) {
         s.use(LearningRate(warmup_cosine({3, 21})));
       }},
      {lengths(1), lengths(2)},
      {[](Session& s) { s.use(Precision::bf16()); }, [](Session& s) { s.use(Precision::fp16()); }},
  };
  for (const auto& [usual, odd] : pairs) {
    std::vector<RankSetup> setups(2);
    setups[0].hooks = usual;
    setups[1].hooks = odd;
    auto trainers = trainers_of(setups);
    for (const std::string& message : run_all(trainers, [](RankTrainer&t, int) { t.step(); })) {
      CHECK(contains(message, "the ranks disagree: rank 0 has \"hook "));
    }
  }
}

TEST_CASE("rank 0's parameters win, unless they are to be compared", "[session][data_parallel]") {
  std::vector<RankSetup> setups(2);
  auto trainers = trainers_of(setups);
  {
    const torch::NoGradGuard no_grad;
    for (Tensor& parameter : trainers[1]->model->parameters()) parameter.add_(1);
  }
  REQUIRE(first_of(run_all(trainers, [](RankTrainer& t, int) { t.step(); })) == "");
  const auto a = trainers[0]->snapshot(), b = trainers[1]->snapshot();
  for (size_t i = 0; i < a.size(); ++i) CHECK(a[i].equal(b[i]));

  setups[0].data_parallel.initial_parameters(InitialParameters::check);
  setups[1].data_parallel.initial_parameters(InitialParameters::check);
  trainers = trainers_of(setups);
  REQUIRE(first_of(run_all(trainers, [](RankTrainer& t, int) { t.step(); })) == "");
  trainers = trainers_of(setups);
  {
    const torch::NoGradGuard no_grad;
    trainers[1]->model->parameters().back()[0] += 1e-6;
  }
  for (const std::string& message : run_all(trainers, [](RankTrainer&t, int) { t.step(); })) {
    CHECK(contains(message, "initial value of parameter 1.bias"));
  }
}

TEST_CASE("an unused parameter is an error with its name, or zero where that is wanted",
          "[session][data_parallel]") {
  const auto unused_step = [](RankTrainer& trainer) {
    auto [x] = trainer.session->begin(trainer.inputs);
    const Tensor first = trainer.model->children().front()->as<torch::nn::Linear>()->forward(x);
    trainer.session->backward(first.square().mean());
    trainer.session->step();
  };
  for (const bool on_all : {true, false}) {
    auto trainers = trainers_of(std::vector<RankSetup>(2));
    const auto messages = run_all(trainers, [&](RankTrainer& trainer, int rank) {
      trainer.step();
      on_all || rank == 1 ? unused_step(trainer) : trainer.step();
    });
    CHECK(contains(messages[1], "1.weight"));
    CHECK(contains(messages[1], "1.bias"));
    CHECK(contains(messages[1], "unused_is_zero"));
    CHECK(contains(messages[0], on_all ? "1.weight" : "rank 1 left: backward failed: backward reached"));
  }
  std::vector<RankSetup> setups(2);
  for (RankSetup& setup : setups)
    setup.data_parallel.unused_is_zero(true).first_bucket_bytes(1).bucket_bytes(1);
  auto trainers = trainers_of(setups);
  REQUIRE(first_of(run_all(trainers, [&](RankTrainer& trainer, int rank) {
            for (int step = 0; step < 4; ++step)
              step % 2 == 0 && rank == 1 ? unused_step(trainer) : trainer.step();
          })) == "");
  const auto a = trainers[0]->snapshot(), b = trainers[1]->snapshot();
  for (size_t i = 0; i < a.size(); ++i) CHECK(a[i].equal(b[i]));
}

TEST_CASE("a layer that is dropped but used elsewhere is refused", "[session][data_parallel]") {
  // The block is registered with the gates and called outside of them, too.
  auto options = LayerDropOptions().theta_bar(0.01).gamma(10);
  std::vector<SmallModel> models = {small_model_with_gates(options), small_model_with_gates(options)};
  const auto worlds = Communicator::in_process(2);
  const auto messages = run_ranks(2, [&](int rank) {
    SmallModel& model = models[static_cast<size_t>(rank)];
    torch::optim::SGD optimizer(model->parameters(), 0.01);
    Session session(*model, optimizer, worlds[static_cast<size_t>(rank)]);
    session.use(model->layer_drop)
        .use(DataParallel(DataParallelOptions().first_bucket_bytes(1).bucket_bytes(1)));
    for (int step = 0; step < 12; ++step) {
      auto [x, y] = session.begin(small_batch(step).first, small_batch(step).second);
      session.backward(model->loss(x, y) + model->blocks.back()->weight.square().mean());
      session.step();
    }
  });
  for (const std::string& message : messages) CHECK(contains(message, "must not be used elsewhere"));
}

}  // namespace pacer::testing
