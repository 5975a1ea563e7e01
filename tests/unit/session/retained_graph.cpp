// Two losses on one forward pass: the first backward keeps the graph for the second.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/message_of.h"
#include "support/optimizers/optimizers.h"
#include "support/session/small_model.h"
#include "support/session/two_layers.h"

namespace pacer::testing::session_retained_graph {
namespace {

using torch::optim::SGD;
using torch::optim::SGDOptions;

torch::nn::Sequential head() {
  torch::manual_seed(8);
  return torch::nn::Sequential(torch::nn::Linear(2, 1));
}

// Features that a model is trained for, and a critic that looks at them.
struct Features {
  Tensor loss(const Tensor& features) { return features.square().mean(); }
  Tensor loss_of_critic(const Tensor& features) { return (critic->forward(features) - 1).square().mean(); }
  torch::nn::Sequential model = two_layers(), critic = head();
  SGD of_model{model->parameters(), SGDOptions(0.1)}, of_critic{critic->parameters(), SGDOptions(0.1)};
};

void train_by_hand(Features& trained, int64_t steps) {
  for (int64_t step = 0; step < steps; ++step) {
    const Tensor features = trained.model->forward(batch_of(step, 3));
    trained.of_critic.zero_grad();
    trained.loss_of_critic(features).backward({}, /*retain_graph=*/true);
    trained.of_critic.step();
    trained.of_model.zero_grad();
    trained.loss(features).backward();
    trained.of_model.step();
  }
}

void train_in_sessions(Features& trained, int64_t steps, const BackwardOptions& of_first) {
  Session of_model(trained.model, trained.of_model), of_critic(trained.critic, trained.of_critic);
  for (int64_t step = 0; step < steps; ++step) {
    auto [x] = of_model.begin(batch_of(step, 3));
    const Tensor features = trained.model->forward(x);
    auto [seen] = of_critic.begin(features);
    of_critic.backward(trained.loss_of_critic(seen), of_first);
    of_critic.step();
    trained.of_model.zero_grad();
    of_model.backward(trained.loss(features));
    of_model.step();
  }
  of_model.finish();
  of_critic.finish();
}

}  // namespace

TEST_CASE("a graph that is kept serves the loss of a second Session", "[session][gradients]") {
  Features reference, trained;
  train_by_hand(reference, 4);
  train_in_sessions(trained, 4, BackwardOptions().retain_graph(true));
  CHECK(same_bits(trained.model->parameters(), reference.model->parameters()));
  CHECK(same_bits(trained.critic->parameters(), reference.critic->parameters()));
}

TEST_CASE("a graph that is not kept is gone after backward", "[session][gradients]") {
  Features trained;
  const std::string message = message_of([&] { train_in_sessions(trained, 1, BackwardOptions()); });
  CHECK(message.find("a second time") != std::string::npos);  // LibTorch's words
}

TEST_CASE("a graph that is kept serves all losses of a window", "[session][gradients]") {
  const auto with = [](auto make) {
    return [make](Session& session, SmallModel& model) { session.use(make(model)); };
  };
  const std::vector<std::function<void(Session&, SmallModel&)>> ways{
      [](Session&, SmallModel&) {},
      with([](SmallModel& model) { return Recompute(model->stack); }),
      with([](SmallModel& model) {
        return Recompute(model->stack, RecomputeOptions().keep(KeptOperators::products()));
      }),
      with([](SmallModel&) { return Shards(ShardsOptions().what(Sharded::state)); }),
      with([](SmallModel&) { return Shards(); }),
      with([](SmallModel& model) { return Shards(model->stack); })};
  const Tensor ids = torch::arange(3 * kFullLength).view({3, kFullLength}) % kVocabulary;
  const auto losses = [](const Tensor& logits) {
    return std::make_pair(logits.square().mean(), logits.sin().mean());
  };
  for (const bool is_fused : {false, true}) {
    SmallModel reference = small_model(0, nullptr, 3, is_fused);
    SGD by_hand(reference->parameters(), SGDOptions(0.1));
    const auto [first, second] = losses(reference->forward(ids));
    ((first + second) / 2).backward();
    by_hand.step();
    for (const int ranks : {1, 2}) {
      for (size_t way = 0; way < ways.size(); ++way) {
        CAPTURE(is_fused, ranks, way);
        const auto worlds = Communicator::in_process(ranks);
        std::vector<SmallModel> models;
        for (int rank = 0; rank < ranks; ++rank) models.push_back(small_model(0, nullptr, 3, is_fused));
        CHECK(first_of(run_ranks(ranks, [&](int rank) {
                SmallModel& model = models[static_cast<size_t>(rank)];
                FusedSgd optimizer(model->parameters(), FusedSgdOptions(0.1));
                Session session(model, optimizer, worlds[static_cast<size_t>(rank)]);
                session.use(GradientAccumulation(2));
                ways[way](session, model);
                std::pair<Tensor, Tensor> both;
                for (const bool is_first : {true, false}) {
                  const auto [x] = session.begin(ids);
                  if (is_first) both = losses(model->forward(x));
                  session.backward(is_first ? both.first : both.second,
                                   BackwardOptions().retain_graph(is_first));
                  RANK_REQUIRE(session.step() == !is_first);
                }
                const auto whole = session.whole_parameters();
                for (size_t i = 0; i < reference->parameters().size(); ++i) {
                  const Tensor difference = model->parameters()[i] - reference->parameters()[i];
                  RANK_REQUIRE(difference.abs().max().item<double>() < 1e-6);  // sums in another order
                }
                session.finish();
              })) == "");
      }
    }
  }
}

}  // namespace pacer::testing::session_retained_graph
