// What happens when ranks are not alike: they differ from the start (F4), fall out of step, run out of data,
// leave a parameter unused, or throw (F5). Always an error on every rank that names the culprit, never a
// hang.
#include <functional>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "support/catch.h"
#include "support/ranks.h"
#include "support/registry.h"

namespace pacer::testing {
namespace {

using namespace std::chrono_literals;

// One rank's model and training, as a table of what can be different.
struct Setup {
  std::vector<int64_t> widths = {4, 6, 3};
  bool bias = true;
  at::ScalarType dtype = at::kFloat;
  bool reversed = false;  // order of the parameters in the optimizer
  bool two_groups = false;
  bool frozen = false;  // the first layer
  FusedAdamWOptions options = FusedAdamWOptions(0.01);
  std::function<void(Session&)> hooks = [](Session&) {};
  DataParallelOptions data_parallel;
  int64_t first_step = 0;
};

struct Trainer {
  Trainer(const Setup& setup, std::shared_ptr<Communicator> world) {
    torch::manual_seed(3);
    for (size_t i = 0; i + 1 < setup.widths.size(); ++i) {
      model->push_back(
          torch::nn::Linear(torch::nn::LinearOptions(setup.widths[i], setup.widths[i + 1]).bias(setup.bias)));
    }
    model->to(setup.dtype);
    inputs = torch::ones({2, setup.widths.front()}, setup.dtype);
    if (setup.frozen) model->parameters().front().requires_grad_(false);
    std::vector<Tensor> parameters = model->parameters();
    if (setup.reversed) std::reverse(parameters.begin(), parameters.end());
    std::vector<torch::optim::OptimizerParamGroup> groups;
    if (setup.two_groups) {
      groups.emplace_back(std::vector<Tensor>{parameters.front()});
      parameters.erase(parameters.begin());
    }
    groups.emplace_back(parameters);
    optimizer = std::make_unique<FusedAdamW>(groups, setup.options);
    session = std::make_unique<Session>(*model, *optimizer, world);
    session->use(PartsProbe(parts)).use(DataParallel(setup.data_parallel));
    setup.hooks(*session);
    parts->progress.step = setup.first_step;
  }

  void begin_and_backward() {
    auto [x] = session->begin(inputs);
    session->backward(model->forward(x).square().mean());
  }
  void step() {
    do {
      begin_and_backward();
    } while (!session->step());
  }
  std::vector<Tensor> snapshot() const {
    std::vector<Tensor> values;
    for (const Tensor& parameter : model->parameters()) values.push_back(parameter.detach().clone());
    return values;
  }

  torch::nn::Sequential model;
  Tensor inputs;
  std::unique_ptr<FusedAdamW> optimizer;
  std::unique_ptr<Session> session;
  SessionParts* parts = nullptr;
};

std::vector<std::unique_ptr<Trainer>> trainers_of(const std::vector<Setup>& setups,
                                                  const CommunicatorOptions& options = {}) {
  std::vector<std::unique_ptr<Trainer>> trainers;
  const auto worlds = Communicator::in_process(static_cast<int>(setups.size()), options);
  for (size_t i = 0; i < setups.size(); ++i) {
    trainers.push_back(std::make_unique<Trainer>(setups[i], worlds[i]));
  }
  return trainers;
}

// The messages of `trainers`, each running f in its thread.
std::vector<std::string> run_all(std::vector<std::unique_ptr<Trainer>>& trainers,
                                 const std::function<void(Trainer&, int)>& f) {
  return run_ranks(static_cast<int>(trainers.size()),
                   [&](int rank) { f(*trainers[static_cast<size_t>(rank)], rank); });
}

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
    std::function<void(Setup&)> change;
  };
  const auto use = [](auto make) {
    return [make](Setup& s) { s.hooks = [make](Session& session) { session.use(make()); }; };
  };
  const std::vector<Difference> differences = {
      {"[7, 4]",
       [](Setup& s) {
         s.widths = {4, 7, 3};
       }},
      {"2.weight, Float [3, 3]",
       [](Setup& s) {
         s.widths = {4, 6, 3, 3};
       }},
      {"parameter 1", [](Setup& s) { s.bias = false; }},
      {"Double", [](Setup& s) { s.dtype = at::kDouble; }},
      {"1.bias", [](Setup& s) { s.reversed = true; }},
      {"parameter groups: 2", [](Setup& s) { s.two_groups = true; }},
      {"frozen", [](Setup& s) { s.frozen = true; }},
      {"beta1",
       [](Setup& s) {
         s.options.betas({0.8, 0.999});
       }},
      {"beta2",
       [](Setup& s) {
         s.options.betas({0.9, 0.99});
       }},
      {"eps", [](Setup& s) { s.options.eps(1e-7); }},
      {"weight_decay", [](Setup& s) { s.options.weight_decay(0.5); }},
      {"finite_check", [](Setup& s) { s.options.finite_check(true); }},
      {"hook gradient_clipping", use([] { return GradientClipping(1.0); })},
      {"micro-steps: 2", use([] { return GradientAccumulation(2); })},
      {"hook learning_rate", use([] {
         return LearningRate(warmup_cosine({3, 20}));
       })},
      {"buckets", [](Setup& s) { s.data_parallel.bucket_bytes(100); }},
      {"BFloat16", [](Setup& s) { s.data_parallel.wire_dtype(at::kBFloat16); }},
      {"are zero", [](Setup& s) { s.data_parallel.unused_is_zero(true); }},
      {"step 5", [](Setup& s) { s.first_step = 5; }},
  };
  for (const Difference& difference : differences) {
    for (const int odd : {0, 2}) {
      INFO(difference.text << ", rank " << odd);
      std::vector<Setup> setups(3);
      difference.change(setups[static_cast<size_t>(odd)]);
      auto trainers = trainers_of(setups);
      std::vector<std::vector<Tensor>> before;
      for (const auto& trainer : trainers) before.push_back(trainer->snapshot());
      const auto messages = run_all(trainers, [](Trainer& trainer, int) { trainer.step(); });
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
    std::vector<Setup> setups(2);
    setups[0].hooks = usual;
    setups[1].hooks = odd;
    auto trainers = trainers_of(setups);
    for (const std::string& message : run_all(trainers, [](Trainer&t, int) { t.step(); })) {
      CHECK(contains(message, "the ranks disagree: rank 0 has \"hook "));
    }
  }
}

TEST_CASE("the learning rate may differ between ranks' options, and rank 0's parameters win",
          "[session][data_parallel]") {
  std::vector<Setup> setups(2);
  setups[1].options.lr(0.01);
  auto trainers = trainers_of(setups);
  {
    const torch::NoGradGuard no_grad;
    for (Tensor& parameter : trainers[1]->model->parameters()) parameter.add_(1);
  }
  REQUIRE(first_of(run_all(trainers, [](Trainer& t, int) { t.step(); })) == "");
  const auto a = trainers[0]->snapshot(), b = trainers[1]->snapshot();
  for (size_t i = 0; i < a.size(); ++i) CHECK(a[i].equal(b[i]));

  setups[0].data_parallel.initial_parameters(InitialParameters::check);
  setups[1].data_parallel.initial_parameters(InitialParameters::check);
  trainers = trainers_of(setups);
  REQUIRE(first_of(run_all(trainers, [](Trainer& t, int) { t.step(); })) == "");
  trainers = trainers_of(setups);
  {
    const torch::NoGradGuard no_grad;
    trainers[1]->model->parameters().back()[0] += 1e-6;
  }
  for (const std::string& message : run_all(trainers, [](Trainer&t, int) { t.step(); })) {
    CHECK(contains(message, "initial value of parameter 1.bias"));
  }
}

TEST_CASE("a rank whose data ends before the others' is named by all", "[session][data_parallel]") {
  for (const int early : {0, 2}) {
    auto trainers = trainers_of(std::vector<Setup>(3));
    const auto messages = run_all(trainers, [&](Trainer& trainer, int rank) {
      for (int step = 0; step < (rank == early ? 3 : 5); ++step) trainer.step();
      trainer.session->finish();
    });
    for (const std::string& message : messages) {
      CHECK(contains(message, "has no more data after step 3"));
      CHECK(contains(message, early == 0 ? "rank 0 has no more data" : "rank 2 has no more data"));
    }
  }
  auto trainers = trainers_of(std::vector<Setup>(3));
  REQUIRE(first_of(run_all(trainers, [&](Trainer& trainer, int) {
            for (int step = 0; step < 3; ++step) trainer.step();
            trainer.session->finish();
          })) == "");
}

TEST_CASE("a window that ends early counts what all ranks have", "[session][data_parallel]") {
  Setup setup;
  setup.hooks = [](Session& session) { session.use(GradientAccumulation(4)); };
  auto trainers = trainers_of({setup, setup});
  REQUIRE(first_of(run_all(trainers, [&](Trainer& trainer, int rank) {
            trainer.step();
            trainer.inputs.fill_(rank + 2);
            for (int m = 0; m < 2; ++m) {
              trainer.begin_and_backward();
              trainer.session->step();
            }
            trainer.session->finish();
          })) == "");
  const auto a = trainers[0]->snapshot(), b = trainers[1]->snapshot();
  for (size_t i = 0; i < a.size(); ++i) CHECK(a[i].equal(b[i]));
  CHECK(trainers[0]->session->progress().step == 2);

  trainers = trainers_of({setup, setup});
  const auto messages = run_all(trainers, [&](Trainer& trainer, int rank) {
    trainer.step();
    for (int m = 0; m < rank; ++m) {
      trainer.begin_and_backward();
      trainer.session->step();
    }
    trainer.session->finish();
  });
  for (const std::string& message : messages) {
    CHECK(contains(message, "rank 0 has no more data after step 1, rank 1 ends with a window of 1"));
  }
}

TEST_CASE("an unused parameter is an error with its name, or zero where that is wanted",
          "[session][data_parallel]") {
  const auto unused_step = [](Trainer& trainer) {
    auto [x] = trainer.session->begin(trainer.inputs);
    const Tensor first = trainer.model->children().front()->as<torch::nn::Linear>()->forward(x);
    trainer.session->backward(first.square().mean());
    trainer.session->step();
  };
  for (const bool on_all : {true, false}) {
    auto trainers = trainers_of(std::vector<Setup>(2));
    const auto messages = run_all(trainers, [&](Trainer& trainer, int rank) {
      trainer.step();
      on_all || rank == 1 ? unused_step(trainer) : trainer.step();
    });
    CHECK(contains(messages[1], "1.weight"));
    CHECK(contains(messages[1], "1.bias"));
    CHECK(contains(messages[1], "unused_is_zero"));
    CHECK(contains(messages[0], on_all ? "1.weight" : "rank 1 left: backward failed: backward reached"));
  }
  std::vector<Setup> setups(2);
  for (Setup& setup : setups) setup.data_parallel.unused_is_zero(true).first_bucket_bytes(1).bucket_bytes(1);
  auto trainers = trainers_of(setups);
  REQUIRE(first_of(run_all(trainers, [&](Trainer& trainer, int rank) {
            for (int step = 0; step < 4; ++step)
              step % 2 == 0 && rank == 1 ? unused_step(trainer) : trainer.step();
          })) == "");
  const auto a = trainers[0]->snapshot(), b = trainers[1]->snapshot();
  for (size_t i = 0; i < a.size(); ++i) CHECK(a[i].equal(b[i]));
}

TEST_CASE("F5: an exception on one rank ends the others with its reason", "[session][data_parallel]") {
  struct Thrower : Hook {
    Thrower(std::string at, int64_t step) : at_(std::move(at)), step_(step) {}
    std::string hook_name() const override { return "thrower"; }
    Slot slot() const override { return Slot::record; }
    void fail(const char* at, int64_t step) const {
      if (at_ == at && step == step_) throw InvalidArgument("made up at " + at_);
    }
    void begin(const Progress& p, MicroBatch&) override { fail("begin", p.step); }
    void backward_begin(const Progress& p) override { fail("backward", p.step); }
    void backward_end(const Progress& p) override { fail("backward_end", p.step); }
    void gradients_ready(const Progress& p) override { fail("ready", p.step); }
    void after_step(StepReport& r) override { fail("after", r.progress().step - 1); }
    std::string at_;
    int64_t step_;
  };
  for (const char* at : {"begin", "backward", "backward_end", "ready", "after", "user"}) {
    INFO(at);
    std::vector<Setup> setups(3);
    for (size_t i = 0; i < 3; ++i) {
      setups[i].hooks = [at, i](Session& s) { s.use(Thrower(i == 1 ? at : "never", 2)); };
    }
    const auto began = std::chrono::steady_clock::now();
    auto trainers = trainers_of(setups);
    const auto messages = run_all(trainers, [&](Trainer& trainer, int rank) {
      for (int step = 0; step < 5; ++step) {
        if (rank != 1) {
          trainer.step();
          continue;
        }
        try {
          if (at == std::string("user") && step == 2) throw InvalidArgument("made up by the user");
          trainer.step();
        } catch (...) {
          trainer.session.reset();  // as the end of its scope would
          throw;
        }
      }
    });
    CHECK(contains(messages[1], "made up"));
    CHECK(contains(messages[0], "rank 1 left: "));
    CHECK(contains(messages[2], "rank 1 left: "));
    CHECK(std::chrono::steady_clock::now() - began < 20s);
  }
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
