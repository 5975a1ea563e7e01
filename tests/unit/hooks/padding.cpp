// Micro-batches that are all padding: a mean over no token is 0 / 0, and must not reach the weights.
#include <string>
#include <vector>

#include "support/catch.h"
#include "support/parallel/rank_trainers.h"
#include "support/session/mistakes_trainer.h"

namespace pacer::testing::padding {
namespace {

// The mean over tokens that are no padding, as users write it. Its gradient is not finite where there is
// none.
Tensor masked_mean(const Tensor& outputs, bool is_padding) {
  const Tensor mask = is_padding ? torch::zeros_like(outputs) : torch::ones_like(outputs);
  return (outputs.square() * mask).sum() / mask.sum();
}

void micro_step(Trainer& t, bool is_padding) {
  auto [x] = t.session.begin(is_padding ? t.inputs * 3 : t.inputs);
  t.session.count_tokens(is_padding ? 0 : 5);
  t.session.backward(masked_mean(t.model->forward(x), is_padding));
  t.session.step();
}

// Trains `windows` in each of which some micro-batches are padding.
std::vector<Tensor> trained(const std::vector<std::vector<bool>>& windows) {
  torch::manual_seed(5);
  Trainer t(0.01);
  SessionParts* parts = nullptr;
  t.session.use(GradientAccumulation(
      GradientAccumulationOptions(static_cast<int64_t>(windows.front().size())).weight_by_tokens(true)));
  t.session.use(GradientClipping(1.0)).use(PartsProbe(parts));
  parts->record_loss = true;
  for (const auto& window : windows) {
    for (const bool is_padding : window) {
      micro_step(t, is_padding);
      if (parts->window.loss.defined()) CHECK(parts->window.loss.isfinite().item<bool>());
    }
  }
  CHECK(t.session.skipped_steps() == 0);
  t.session.finish();
  return clones(t.model->parameters());
}

// Two ranks, each of which takes a step with each of its batches.
struct Outcome {
  std::vector<Tensor> values[2];
  std::string messages;
  int64_t skipped = 0;
};
Outcome trained_on_two(const std::vector<bool>& first, const std::vector<bool>& second, bool is_nan = true) {
  RankSetup setup;
  setup.hooks = [](Session& session) {
    session.use(GradientAccumulation(GradientAccumulationOptions(1).weight_by_tokens(true)))
        .use(GradientClipping(1.0));
  };
  auto trainers = trainers_of({setup, setup});
  for (size_t rank = 0; rank < 2; ++rank) trainers[rank]->parts->record_loss = true;
  const auto messages = run_all(trainers, [&](RankTrainer& t, int rank) {
    const auto& batches = rank == 0 ? first : second;
    for (const bool is_padding : batches) {
      auto [x] = t.session->begin(t.inputs * (rank + 1.0));
      t.session->count_tokens(is_padding ? 0 : 5);
      const Tensor outputs = t.model->forward(x);
      t.session->backward(is_padding && !is_nan ? outputs.square().mean() : masked_mean(outputs, is_padding));
      require(t.parts->window.loss.isfinite().item<bool>(), "the loss of the window is not finite");
      t.session->step();
    }
    t.session->finish();
  });
  Outcome outcome;
  for (size_t rank = 0; rank < 2; ++rank) outcome.values[rank] = trainers[rank]->snapshot();
  outcome.messages = first_of(messages);
  outcome.skipped = trainers[0]->session->skipped_steps();
  return outcome;
}

}  // namespace

TEST_CASE("a micro-batch of padding adds exactly nothing, although its loss is not a number",
          "[session][padding]") {
  const auto without = trained({{false}, {false}, {false}});
  CHECK(same_bits(without, trained({{false, true}, {false, true}, {true, false}})));
  CHECK(same_bits(without, trained({{true, false, true}, {false, true, true}, {true, true, false}})));
  CHECK_FALSE(same_bits(without, trained({{false}, {false}})));
}

TEST_CASE("a window of padding between others leaves no trace in weights and moments", "[session][padding]") {
  // The attempt is counted, but no schedule looks at it here.
  CHECK(same_bits(trained({{false}, {false}}), trained({{false}, {true}, {false}})));
  CHECK(same_bits(trained({{false}, {false}}), trained({{true}, {true}, {false}, {false}, {true}})));
}

TEST_CASE("ranks with and without tokens stay in step, and padding adds nothing", "[session][padding]") {
  const std::vector<bool> real = {false, false, false}, some = {false, true, false};
  const Outcome outcome = trained_on_two(real, some), finite = trained_on_two(real, some, /*is_nan=*/false);
  CHECK(outcome.messages == "");
  CHECK(outcome.skipped == 0);
  CHECK(same_bits(outcome.values[0], outcome.values[1]));
  CHECK(same_bits(outcome.values[0], finite.values[0]));
  for (const Tensor& value : outcome.values[0]) CHECK(value.isfinite().all().item<bool>());
  // The other way round, and both at once.
  CHECK(same_bits(trained_on_two(some, real).values[1], trained_on_two(some, real, false).values[0]));
  const Outcome both = trained_on_two({false, true, false}, {false, true, false});
  CHECK(both.messages == "");
  CHECK(same_bits(both.values[0], both.values[1]));
  CHECK(same_bits(both.values[0], trained_on_two({false, false}, {false, false}).values[0]));
}

TEST_CASE("gradients are zeroed for passes of weight 0 only, and no more when the Session is gone",
          "[session][padding]") {
  torch::nn::Linear model(3, 2);
  FusedAdamW optimizer(model->parameters());
  const auto inputs = torch::ones({4, 3});
  {
    Session session(model, optimizer);
    session.use(GradientAccumulation(GradientAccumulationOptions(2).weight_by_tokens(true)));
    auto [x] = session.begin(inputs);
    session.count_tokens(0);
    session.backward(masked_mean(model->forward(x), /*is_padding=*/true));
    CHECK(count_true(model->weight.grad().ne(0)) == 0);
    CHECK(count_true(model->bias.grad().ne(0)) == 0);
    session.step();
    auto [y] = session.begin(inputs);
    session.count_tokens(4096);  // of weight 1
    session.backward(model->forward(y).sum());
    CHECK(count_true(model->weight.grad().ne(4)) == 0);
    session.step();
  }
  optimizer.zero_grad();
  model->forward(inputs).sum().backward();
  CHECK(count_true(model->weight.grad().ne(4)) == 0);
}

}  // namespace pacer::testing::padding
