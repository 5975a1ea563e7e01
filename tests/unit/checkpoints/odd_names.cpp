// Names are keys, never taken apart: parameters with '/' in theirs, pipelines with torch's optimizers, whose
// state has keys of several parts; and tensors that share memory under two names.
#include <mutex>

#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <pacer/pacer.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"
#include "support/parallel/pipeline_runs.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

using Made = std::unique_ptr<torch::optim::Optimizer>;

// A model whose names are beginnings of each other, and look like keys of state.
struct OddNamesImpl : torch::nn::Module {
  OddNamesImpl() {
    torch::manual_seed(2);
    for (const char* name : {"a", "a/b", "a/exp_avg", "group", "group/0", "optimizer", "a b\tc"}) {
      register_parameter(name, torch::randn({40}));
    }
  }
  Tensor loss() {
    Tensor sum = torch::zeros({});
    double weight = 1;
    for (const Tensor& p : parameters()) sum = sum + weight++ * p.square().mean();
    return sum;
  }
};
TORCH_MODULE(OddNames);

// Steps `from` ... `to` - 1 on so many ranks, with Shards of state where there are several; the weights then.
std::map<std::string, Tensor> odd_weights(const std::string& folder, int ranks, int from, int to) {
  const auto worlds =
      Communicator::in_process(ranks, CommunicatorOptions().timeout(std::chrono::seconds(30)));
  std::vector<OddNames> models(static_cast<size_t>(ranks), nullptr);
  for (OddNames& model : models) model = OddNames();
  const auto messages = run_ranks(ranks, [&](int rank) {
    OddNames& model = models[static_cast<size_t>(rank)];
    FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.1));
    Session session(model, optimizer, worlds[static_cast<size_t>(rank)]);
    session.use(Checkpoints(CheckpointsOptions(folder)));
    if (ranks > 1) session.use(Shards(ShardsOptions().what(Sharded::state)));
    require(session.resume().value_or(0) == from, "resumed elsewhere");
    for (int step = from; step < to; ++step) {
      (void)session.begin(torch::zeros({1}));
      session.backward(model->loss());
      session.step();
    }
    session.finish();
  });
  REQUIRE(first_of(messages) == "");
  std::map<std::string, Tensor> weights;
  for (const auto& item : models[0]->named_parameters()) weights[item.key()] = item.value().detach().clone();
  return weights;
}

struct SharingImpl : torch::nn::Module {
  explicit SharingImpl(bool shares) {
    a = register_parameter("a", torch::arange(6.0F));
    b = register_parameter("b", shares ? a.detach().slice(0, 2, 5) : torch::arange(2.0F, 5.0F));
  }
  Tensor a, b;
};
TORCH_MODULE(Sharing);

}  // namespace

TEST_CASE("parameters with '/' in their names are saved and resumed, by shards of any number of ranks",
          "[resume][shards]") {
  const CapturedStderr quiet;
  const TemporaryFolder straight;
  const auto wanted = odd_weights(straight.path("c"), 1, 0, 5);
  for (const int before : {1, 2, 4}) {  // means of as many gradients are exact
    for (const int after : {1, 2}) {
      CAPTURE(before, after);
      const TemporaryFolder folder;
      odd_weights(folder.path("c"), before, 0, 2);
      const auto found = odd_weights(folder.path("c"), after, 2, 5);
      for (const auto& [name, weight] : wanted) {
        CAPTURE(name);
        CHECK(found.at(name).equal(weight));
      }
    }
  }
}

TEST_CASE("a pipeline with any of torch's optimizers resumes with any number of stages",
          "[pipeline][resume]") {
  using namespace pipelines;
  const std::vector<std::pair<const char*, std::function<Made(const NamedParameters&)>>> optimizers = {
      {"Adam",
       [](const NamedParameters& p) -> Made {
         return std::make_unique<torch::optim::Adam>(p.values(),
                                                     torch::optim::AdamOptions(0.01).amsgrad(true));
       }},
      {"AdamW",
       [](const NamedParameters& p) -> Made {
         return std::make_unique<torch::optim::AdamW>(p.values(), torch::optim::AdamWOptions(0.01));
       }},
      {"SGD",
       [](const NamedParameters& p) -> Made {
         return std::make_unique<torch::optim::SGD>(p.values(), torch::optim::SGDOptions(0.1).momentum(0.9));
       }},
      {"RMSprop",
       [](const NamedParameters& p) -> Made {
         return std::make_unique<torch::optim::RMSprop>(
             p.values(), torch::optim::RMSpropOptions(0.01).momentum(0.5).centered(true));
       }},
      {"Adagrad",
       [](const NamedParameters& p) -> Made {
         return std::make_unique<torch::optim::Adagrad>(p.values(), torch::optim::AdagradOptions(0.05));
       }},
  };
  const auto weights_after = [](const std::string& folder, const Setup& setup, int stages, int64_t from,
                                int64_t to) {
    const auto worlds =
        Communicator::in_process(stages, CommunicatorOptions().timeout(std::chrono::seconds(60)));
    std::vector<LanguageModel> models;
    for (int rank = 0; rank < stages; ++rank) models.push_back(make_model(setup));
    std::map<std::string, Tensor> weights;
    std::mutex mutex;
    const auto messages = run_ranks(stages, [&](int rank) {
      const auto at = static_cast<size_t>(rank);
      PipelineRank own(setup, one_f_one_b(4), stages, worlds[at], models[at]);
      own.session->use(Checkpoints(CheckpointsOptions(folder)));
      require(own.session->resume().value_or(0) == from, "resumed elsewhere");
      for (int64_t step = from; step < to; ++step) own.step(step);
      own.session->finish();
      const std::lock_guard<std::mutex> lock(mutex);
      for (const auto& [name, weight] : own.weights()) weights[name] = weight;
    });
    CHECK(first_of(messages) == "");
    return weights;
  };
  const CapturedStderr quiet;
  for (const auto& [name, make] : optimizers) {
    for (const bool is_tied : {false, true}) {
      Setup setup;
      setup.depth = 3;
      setup.is_tied = is_tied;
      if (is_tied) setup.options = PipelineOptions().first({"embedding"}).last({"norm", "embedding"});
      const auto& of_optimizer = make;
      setup.optimizer = [of_optimizer](const NamedParameters& p) { return of_optimizer(p); };
      const TemporaryFolder straight;
      const auto wanted = weights_after(straight.path("c"), setup, 2, 0, 4);
      for (const int after : {2, 3}) {
        CAPTURE(name, is_tied, after);
        const TemporaryFolder folder;
        weights_after(folder.path("c"), setup, 2, 0, 2);
        CHECK(difference(wanted, weights_after(folder.path("c"), setup, after, 2, 4)) == "");
      }
    }
  }
}

TEST_CASE("a hook whose name has a '/' is refused", "[session]") {
  struct Odd : Hook {
    std::string hook_name() const override { return "my/hook"; }
    Slot slot() const override { return Slot::record; }
  };
  torch::nn::Linear model(3, 2);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  Session session(model, optimizer);
  CHECK(contains(refusal([&] { session.use(Odd()); }), "my/hook has a '/' in its name"));
}

TEST_CASE("tensors that share memory are refused two values of one element", "[resume]") {
  const CapturedStderr quiet;
  for (const bool agree : {true, false}) {
    CAPTURE(agree);
    const TemporaryFolder folder;
    const auto run = [&](bool shares, double rate) {
      Sharing model(shares);
      torch::optim::SGD optimizer(model->parameters(), rate);
      Session session(model, optimizer);
      session.use(Checkpoints(CheckpointsOptions(folder.path("c"))));
      const auto step = session.resume();
      (void)session.begin(torch::zeros({1}));
      session.backward(model->a.sum() + model->b.square().sum());
      session.step();
      session.finish();
      save_weights(*model, folder.path("w.safetensors"));
      return step;
    };
    run(/*shares=*/false, agree ? 0 : 0.1);
    Sharing target(/*shares=*/true);
    const Tensor before = target->a.detach().clone();
    if (agree) {
      CHECK(run(/*shares=*/true, 0) == 1);
      load_weights(*target, folder.path("w.safetensors"));
    } else {
      const std::string sentence = "\"a\" and \"b\" share memory in this model, but differ";
      CHECK(contains(refusal([&] { run(/*shares=*/true, 0.1); }), sentence));
      CHECK(contains(refusal([&] { load_weights(*target, folder.path("w.safetensors")); }), sentence));
    }
    CHECK(target->a.equal(before));
  }
}

}  // namespace pacer::testing
