// Loops without a DataLoader, beside the same loop written by hand: several passes over a buffer with a network of two
// outputs, and a recurrent network that carries its state.
#include <cmath>
#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/optim/adam.h>

#include <pacer/hooks/gradient_clipping.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/session/session.h>

#include "support/catch.h"
#include "support/optimizers/optimizers.h"
#include "support/session/two_layers.h"

namespace pacer::testing::session_own_loops {
namespace {

using torch::optim::Adam;
using torch::optim::AdamOptions;

struct ActorCriticImpl : torch::nn::Module {
  ActorCriticImpl() { to(at::kDouble); }
  std::tuple<Tensor, Tensor> forward(const Tensor& observation) {
    const Tensor features = body(observation).tanh();
    return {policy(features).log_softmax(1), value(features).squeeze(1)};
  }
  torch::nn::Linear body{register_module("body", torch::nn::Linear(2, 8))};
  torch::nn::Linear policy{register_module("policy", torch::nn::Linear(8, 2))};
  torch::nn::Linear value{register_module("value", torch::nn::Linear(8, 1))};
};
TORCH_MODULE(ActorCritic);

ActorCritic actor_critic() {
  torch::manual_seed(4);
  return ActorCritic();
}

// What takes a step on the loss of a mini-batch.
using Update = std::function<void(const std::vector<Tensor>& batch,
                                  const std::function<Tensor(const std::vector<Tensor>&)>& loss_of)>;

// Proximal policy optimization of a mass on a line, which is pushed left or right. Returns all losses.
std::vector<double> play_and_learn(ActorCritic& network, const Update& update) {
  constexpr int64_t kPlayers = 4, kLength = 6, kRows = kPlayers * kLength;
  torch::manual_seed(5);
  std::vector<double> losses;
  for (int round = 0; round < 4; ++round) {
    std::vector<Tensor> observations, actions, log_probabilities, rewards, values;
    Tensor state = torch::rand({kPlayers, 2}, at::kDouble) * 2 - 1;
    for (int64_t t = 0; t < kLength; ++t) {
      const at::NoGradGuard no_grad;
      const auto [policy, value] = network->forward(state);
      const Tensor action = policy.exp().multinomial(1);
      observations.push_back(state);
      actions.push_back(action);
      log_probabilities.push_back(policy.gather(1, action));
      values.push_back(value);
      const Tensor speed = state.select(1, 1) + 0.1 * (2 * action.squeeze(1) - 1);
      state = torch::stack({state.select(1, 0) + 0.1 * speed, speed}, 1);
      rewards.push_back(-state.square().sum(1));
    }
    const Tensor returns = torch::stack(rewards).flip(0).cumsum(0).flip(0).flatten();
    const std::vector<Tensor> buffer = {torch::cat(observations), torch::cat(actions),
                                        torch::cat(log_probabilities), returns, returns - torch::cat(values)};
    for (int epoch = 0; epoch < 3; ++epoch) {
      for (const Tensor& rows : torch::randperm(kRows).split(10)) {  // the last one has four
        std::vector<Tensor> batch;
        for (const Tensor& each : buffer) batch.push_back(each.index_select(0, rows));
        update(batch, [&](const std::vector<Tensor>& of) {
          const auto [policy, value] = network->forward(of[0]);
          const Tensor ratio = (policy.gather(1, of[1]) - of[2]).exp().squeeze(1);
          const Tensor gain = (of[4] - of[4].mean()) / (of[4].std() + 1e-8);
          const Tensor surrogate = torch::min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean();
          const Tensor entropy = -(policy.exp() * policy).sum(1).mean();
          Tensor loss = -surrogate + 0.5 * (value - of[3]).square().mean() - 0.01 * entropy;
          losses.push_back(loss.item<double>());
          return loss;
        });
      }
    }
  }
  return losses;
}

Update by_session(Session& session) {
  return [&](const std::vector<Tensor>& batch, const auto& loss_of) {
    auto [a, b, c, d, e] = session.begin(batch[0], batch[1], batch[2], batch[3], batch[4]);
    session.backward(loss_of({a, b, c, d, e}));
    session.step();
  };
}

// With max_norm the mean gradient is scaled as the paper on clipping has it; 0: it is not.
Update by_hand(Adam& optimizer, double max_norm) {
  return [&optimizer, max_norm](const std::vector<Tensor>& batch, const auto& loss_of) {
    optimizer.zero_grad();
    loss_of(batch).backward();
    double sum = 0;
    const auto& parameters = optimizer.param_groups()[0].params();
    for (const Tensor& parameter : parameters) sum += parameter.grad().square().sum().template item<double>();
    for (const Tensor& parameter : parameters) {
      if (max_norm > 0 && std::sqrt(sum) > max_norm) parameter.mutable_grad().mul_(max_norm / std::sqrt(sum));
    }
    optimizer.step();
  };
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    largest = std::max(largest, std::abs(a[i] - b[i]) / std::abs(b[i]));
  }
  return largest;
}

// A language model of 11 tokens whose state goes from window to window; returns the losses.
std::vector<double> read_windows(
    const std::function<Tensor(const Tensor&, const Tensor&,
                               const std::function<Tensor(const Tensor&, const Tensor&)>&)>& update,
    torch::nn::Embedding& tokens, torch::nn::LSTM& lstm, torch::nn::Linear& head) {
  constexpr int64_t kWindow = 5;
  const Tensor text = (torch::arange(1 + 8 * kWindow) * torch::arange(1, 4).unsqueeze(1)) % 11;
  auto state = std::make_tuple(torch::zeros({1, 3, 6}, at::kDouble), torch::zeros({1, 3, 6}, at::kDouble));
  std::vector<double> losses;
  for (int64_t window = 0; window < 8; ++window) {
    const Tensor loss =
        update(text.narrow(1, window * kWindow, kWindow), text.narrow(1, window * kWindow + 1, kWindow),
               [&](const Tensor& x, const Tensor& y) {
                 const auto [features, next] = lstm->forward(tokens(x), state);
                 state = std::make_tuple(std::get<0>(next).detach(), std::get<1>(next).detach());
                 return torch::cross_entropy_loss(head(features).flatten(0, 1), y.flatten());
               });
    losses.push_back(loss.item<double>());
  }
  return losses;
}

}  // namespace

TEST_CASE("several passes over a buffer take the steps of the loop written by hand, to the bit",
          "[session][loop]") {
  auto own = actor_critic(), other = actor_critic();
  Adam of_own(own->parameters(), AdamOptions(0.01)), of_other(other->parameters(), AdamOptions(0.01));
  Session session(own, of_own);
  const auto losses = play_and_learn(own, by_session(session));
  session.finish();
  CHECK(losses.size() == 36);
  CHECK(session.progress().step == 36);
  CHECK(losses == play_and_learn(other, by_hand(of_other, 0)));
  CHECK(same_bits(own->parameters(), other->parameters()));
}

TEST_CASE("clipping over a buffer with FusedAdam is that of the loop written by hand, but for rounding",
          "[session][loop]") {
  constexpr double kBound = 1e-13;  // 36 steps in fp64, each of which rounds the norm and the update to 1e-16
  auto own = actor_critic(), other = actor_critic();
  FusedAdam of_own(own->parameters(), FusedAdamOptions(0.01));
  Adam of_other(other->parameters(), AdamOptions(0.01));
  Session session(own, of_own);
  session.use(GradientClipping(0.5));
  const auto losses = play_and_learn(own, by_session(session));
  session.finish();
  CHECK(session.gradient_norm() > 0);
  CHECK(largest_difference(losses, play_and_learn(other, by_hand(of_other, 0.5))) <= kBound);
}

TEST_CASE(
    "a recurrent network that carries its state takes the steps of the loop written by hand, to the bit",
    "[session][loop]") {
  struct ModelImpl : torch::nn::Module {
    ModelImpl() { to(at::kDouble); }
    torch::nn::Embedding tokens{register_module("tokens", torch::nn::Embedding(11, 6))};
    torch::nn::LSTM lstm{
        register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(6, 6).batch_first(true)))};
    torch::nn::Linear head{register_module("head", torch::nn::Linear(6, 11))};
  };
  torch::manual_seed(4);
  auto own = std::make_shared<ModelImpl>();
  torch::manual_seed(4);
  auto other = std::make_shared<ModelImpl>();
  Adam of_own(own->parameters(), AdamOptions(0.01)), of_other(other->parameters(), AdamOptions(0.01));
  Session session(own, of_own);
  const auto losses = read_windows(
      [&](const Tensor& data, const Tensor& target, const auto& loss_of) {
        auto [x, y] = session.begin(data, target);
        Tensor loss = loss_of(x, y);
        session.backward(loss);
        session.step();
        return loss;
      },
      own->tokens, own->lstm, own->head);
  session.finish();
  const auto expected = read_windows(
      [&](const Tensor& data, const Tensor& target, const auto& loss_of) {
        of_other.zero_grad();
        Tensor loss = loss_of(data, target);
        loss.backward();
        of_other.step();
        return loss;
      },
      other->tokens, other->lstm, other->head);
  CHECK(losses == expected);
  CHECK(losses.back() < losses.front());
  CHECK(same_bits(own->parameters(), other->parameters()));
}

}  // namespace pacer::testing::session_own_loops
