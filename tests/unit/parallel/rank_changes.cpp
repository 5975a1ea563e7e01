// What ranks make of a model that changes between two steps: parameters that are unfrozen or added while
// InitialParameters::check is set, and weights and buffers that an evaluation puts in for a while.
#include <functional>
#include <string>
#include <vector>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <pacer/pacer.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::rank_changes {
namespace {

using torch::Tensor;

// Its forward pass writes to running statistics, and to rows of the embedding.
struct WritingModelImpl : torch::nn::Module {
  WritingModelImpl() {
    torch::manual_seed(5);
    words = register_module(
        "words", torch::nn::Embedding(torch::nn::EmbeddingOptions(8, 3).max_norm(0.5).norm_type(2)));
    norm = register_module("norm", torch::nn::BatchNorm1d(3));
    head = register_module("head", torch::nn::Linear(3, 2));
    scale = register_buffer("scale", torch::ones({3}));
  }
  Tensor loss(const Tensor& rows) { return head(norm(words(rows)) * scale).square().mean(); }
  torch::nn::Embedding words{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear head{nullptr};
  Tensor scale;  // training does not change it
};
TORCH_MODULE(WritingModel);

// Two ranks with data of their own, as `f` has them train.
struct Rank {
  Rank(WritingModel its_model, std::shared_ptr<Communicator> its_world, const DataParallelOptions& options)
      : model(std::move(its_model)), world(std::move(its_world)) {
    session.use(DataParallel(options));
  }
  void step() {
    auto [rows] = session.begin(torch::arange(4) + 4 * world->rank());
    session.backward(model->loss(rows));
    session.step();
  }
  int64_t broadcasts() const { return traffic_of(*world, "broadcast").calls; }

  WritingModel model;
  std::shared_ptr<Communicator> world;
  FusedAdamW optimizer{model->parameters(), FusedAdamWOptions(0.01)};
  Session session{*model, optimizer, world};
};

struct Outcome {
  std::vector<std::string> messages;
  std::vector<WritingModel> models;
};
Outcome trained(const DataParallelOptions& options, const std::function<void(Rank&)>& f) {
  const CapturedStderr quiet;
  Outcome outcome;
  outcome.models = {WritingModel(), WritingModel()};
  const auto worlds = Communicator::in_process(2);
  outcome.messages = run_ranks(2, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    Rank own(outcome.models[r], worlds[r], options);
    f(own);
    own.session.finish();
  });
  return outcome;
}

DataParallelOptions checked() { return DataParallelOptions().initial_parameters(InitialParameters::check); }

}  // namespace

TEST_CASE("ranks that compare initial values compare those of later parameters only when a layer is unfrozen",
          "[session][ranks]") {
  const Outcome outcome = trained(checked(), [](Rank& rank) {
    rank.model->head->weight.requires_grad_(false);
    for (int i = 0; i < 2; ++i) rank.step();
    rank.model->head->weight.requires_grad_(true);
    for (int i = 0; i < 2; ++i) rank.step();
  });
  REQUIRE(first_of(outcome.messages) == "");
  const auto first = outcome.models[0]->parameters(), second = outcome.models[1]->parameters();
  for (size_t i = 0; i < first.size(); ++i) CHECK(first[i].equal(second[i]));
  CHECK(outcome.models[0]->norm->running_mean.equal(outcome.models[1]->norm->running_mean));
}

TEST_CASE("a buffer that the loop writes to between evaluations is rank 0's", "[session][ranks]") {
  const Outcome outcome = trained(DataParallelOptions(), [](Rank& rank) {
    const auto measure = [&] {
      const torch::NoGradGuard no_grad;
      rank.model->scale.mul_(2);
      rank.model->scale.div_(2);
      return 0.0;
    };
    for (int i = 0; i < 3; ++i) {
      rank.step();
      (void)rank.session.evaluate(measure);
      if (i == 1) rank.model->scale.mul_(2 + rank.world->rank());
      (void)rank.session.evaluate(measure);
    }
  });
  REQUIRE(first_of(outcome.messages) == "");
  for (const WritingModel& model : outcome.models) CHECK(model->scale.eq(2).all().item<bool>());
}

TEST_CASE("buffers that prewarm puts back are not sent after each step", "[session][ranks]") {
  const auto bytes_of_a_step = [](bool prewarms) {
    int64_t bytes = 0;
    const Outcome outcome = trained(DataParallelOptions(), [&](Rank& rank) {
      if (prewarms) rank.session.prewarm([&] { return rank.model->loss(torch::arange(4)); });
      rank.step();
      const int64_t before = traffic_of(*rank.world, "broadcast").bytes_sent;
      rank.step();
      if (rank.world->rank() == 0) bytes = traffic_of(*rank.world, "broadcast").bytes_sent - before;
    });
    CHECK(first_of(outcome.messages) == "");
    return bytes;
  };
  const int64_t without = bytes_of_a_step(false);
  CHECK(without > 0);
  CHECK(bytes_of_a_step(true) == without);
}

TEST_CASE("ranks that compare initial values compare those of a parameter that joins later",
          "[session][ranks]") {
  const Outcome outcome = trained(checked(), [](Rank& rank) {
    rank.step();
    const Tensor late = rank.model->register_parameter("late", torch::full({2}, 1.0 + rank.world->rank()));
    rank.optimizer.add_param_group(torch::optim::OptimizerParamGroup(std::vector<Tensor>{late}));
    rank.step();
  });
  for (const std::string& message : outcome.messages) {
    CHECK(contains(message, "initial value of parameter late"));
  }
}

TEST_CASE(
    "an evaluation that puts other weights and buffers in and takes them out again costs no later step "
    "anything",
    "[session][ranks]") {
  const auto sent = [](bool puts_in) {
    std::vector<Traffic> after(2);
    const Outcome outcome = trained(DataParallelOptions(), [&](Rank& rank) {
      const auto measure = [&] {
        const torch::NoGradGuard no_grad;
        std::vector<Tensor> swapped = rank.model->head->parameters();
        swapped.push_back(rank.model->scale);
        for (const Tensor& tensor : swapped) {
          if (!puts_in) continue;
          const Tensor before = tensor.clone();
          tensor.zero_();
          tensor.copy_(before);
        }
        return rank.model->loss(torch::arange(4)).item<double>();
      };
      rank.session.use(Validation(2, measure));
      if (puts_in) (void)rank.session.evaluate(measure);  // before ranks have the same values
      for (int i = 0; i < 3; ++i) rank.step();
      (void)rank.session.evaluate([&] { return measure() + rank.session.evaluate(measure) + measure(); });
      const Traffic before = traffic_of(*rank.world, "broadcast");
      for (int i = 0; i < 3; ++i) rank.step();
      Traffic& own = after[static_cast<size_t>(rank.world->rank())];
      own = traffic_of(*rank.world, "broadcast");
      own.calls -= before.calls;
      own.bytes_sent -= before.bytes_sent;
    });
    REQUIRE(first_of(outcome.messages) == "");
    return after;
  };
  const std::vector<Traffic> wanted = sent(false), found = sent(true);
  CHECK(wanted[0].calls > 0);  // of what training's forward passes write to
  for (size_t rank = 0; rank < 2; ++rank) {
    CHECK(found[rank].calls == wanted[rank].calls);
    CHECK(found[rank].bytes_sent == wanted[rank].bytes_sent);
  }
}

}  // namespace pacer::testing::rank_changes
