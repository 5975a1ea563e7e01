// Losses of GANs that are more than a mean of scores, each beside the loop written by hand with the same optimizer of
// torch: to the bit.
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <torch/autograd.h>
#include <torch/optim/adam.h>
#include <torch/optim/rmsprop.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/session/small_gan.h"

namespace pacer::testing::session_gan_variants {
namespace {

using torch::autograd::grad;

// One step on a loss of one tensor, in a Session or by hand.
using LossOf = std::function<Tensor(const Tensor&)>;
void step(Session* session, torch::optim::Optimizer& optimizer, const Tensor& input, const LossOf& loss_of) {
  optimizer.zero_grad();
  if (session == nullptr) {
    loss_of(input).backward();
    optimizer.step();
    return;
  }
  auto [x] = session->begin(input);
  session->backward(loss_of(x));
  session->step();
}

// A generator and a critic, and what they are after so many rounds, in Sessions or by hand.
struct Networks {
  std::vector<Tensor> values() const {
    std::vector<Tensor> all;
    for (const auto& network : {generator, critic}) {
      for (const Tensor& parameter : network->parameters()) all.push_back(parameter.detach());
      for (const Tensor& buffer : network->buffers()) all.push_back(buffer);
    }
    return all;
  }
  torch::nn::Sequential generator = small_generator(), critic = small_discriminator();
};

// Half the mean over the batch of the squared norm of the score's gradient with respect to the picture.
Tensor r1_penalty(torch::nn::Sequential& critic, const Tensor& real) {
  const Tensor pictures = real.detach().requires_grad_();
  const Tensor scores = critic->forward(pictures);
  const Tensor gradient =
      grad({scores.sum()}, {pictures}, {}, /*retain_graph=*/true, /*create_graph=*/true).front();
  return gradient.square().sum({1, 2, 3}).mean() / 2;
}

}  // namespace

TEST_CASE("a Wasserstein critic with clipped weights takes five steps for each of the generator's",
          "[session][gan]") {
  const auto train = [](bool with_sessions) {
    Networks networks;
    torch::optim::RMSprop of_generator(networks.generator->parameters(), torch::optim::RMSpropOptions(5e-3));
    torch::optim::RMSprop of_critic(networks.critic->parameters(), torch::optim::RMSpropOptions(5e-3));
    Session generates(networks.generator, of_generator), criticizes(networks.critic, of_critic);
    for (int round = 0; round < 3; ++round) {
      for (int i = 0; i < 5; ++i) {
        const int number = 5 * round + i;
        step(with_sessions ? &criticizes : nullptr, of_critic, small_pictures(number),
             [&](const Tensor& real) {
               const Tensor fake = networks.generator->forward(small_noise(number)).detach();
               return networks.critic->forward(fake).mean() - networks.critic->forward(real).mean();
             });
        const at::NoGradGuard no_grad;
        for (Tensor& parameter : networks.critic->parameters()) parameter.clamp_(-0.05, 0.05);
      }
      step(with_sessions ? &generates : nullptr, of_generator, small_noise(100 + round),
           [&](const Tensor& z) { return -networks.critic->forward(networks.generator->forward(z)).mean(); });
    }
    return networks.values();
  };
  CHECK(same_bits(train(true), train(false)));
}

TEST_CASE("a penalty on the gradient of a discriminator's score is a part of its loss", "[session][gan]") {
  const auto train = [](bool with_sessions) {
    Networks networks;
    torch::optim::Adam of_critic(networks.critic->parameters(), torch::optim::AdamOptions(0.01));
    Session discriminates(networks.critic, of_critic);
    for (int i = 0; i < 4; ++i) {
      step(with_sessions ? &discriminates : nullptr, of_critic, small_pictures(i), [&](const Tensor& real) {
        const Tensor fake = networks.generator->forward(small_noise(i)).detach();
        return torch::softplus(-networks.critic->forward(real)).mean() +
               torch::softplus(networks.critic->forward(fake)).mean() +
               10 * r1_penalty(networks.critic, real);
      });
    }
    return networks.values();
  };
  const auto values = train(true);
  CHECK(same_bits(values, train(false)));
}

TEST_CASE("ranks take a penalty on the gradient of a score into their mean", "[session][gan][ranks]") {
  const auto parameters_of = [](const Networks& networks) {
    std::vector<Tensor> all;
    for (const Tensor& parameter : networks.critic->parameters()) all.push_back(parameter.detach());
    return all;
  };
  const auto loss_of = [](Networks& networks, const Tensor& real) {
    return networks.critic->forward(real).mean() + r1_penalty(networks.critic, real);
  };
  Networks by_hand;
  torch::optim::Adam optimizer(by_hand.critic->parameters(), torch::optim::AdamOptions(0.01));
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    for (int rank = 0; rank < 2; ++rank) loss_of(by_hand, small_pictures(2 * i + rank)).backward();
    for (Tensor& parameter : by_hand.critic->parameters()) parameter.mutable_grad().div_(2);
    optimizer.step();
  }
  const auto worlds = Communicator::in_process(2);
  std::vector<Networks> networks(2);
  REQUIRE(first_of(run_ranks(2, [&](int rank) {
            Networks& own = networks[static_cast<size_t>(rank)];
            torch::optim::Adam of_rank(own.critic->parameters(), torch::optim::AdamOptions(0.01));
            Session session(own.critic, of_rank, worlds[static_cast<size_t>(rank)]);
            for (int i = 0; i < 3; ++i) {
              step(&session, of_rank, small_pictures(2 * i + rank),
                   [&](const Tensor& real) { return loss_of(own, real); });
            }
            session.finish();
          })) == "");
  for (const Networks& own : networks) CHECK(same_bits(parameters_of(own), parameters_of(by_hand)));
}

TEST_CASE("one loss through two generators is one Session over both", "[session][gan]") {
  struct BothImpl : torch::nn::Module {
    // Pictures [N, 1, 8, 8] to pictures.
    static torch::nn::Sequential make() {
      using torch::nn::Conv2d;
      using torch::nn::Conv2dOptions;
      return torch::nn::Sequential(Conv2d(Conv2dOptions(1, 4, 3).padding(1)), torch::nn::ReLU(),
                                   Conv2d(Conv2dOptions(4, 1, 3).padding(1)));
    }
    torch::nn::Sequential there{register_module("there", make())}, back{register_module("back", make())};
  };
  const auto train = [](bool with_session) {
    torch::manual_seed(7);
    auto both = std::make_shared<BothImpl>();
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(both->there->parameters(), std::make_unique<torch::optim::AdamOptions>(0.01));
    groups.emplace_back(both->back->parameters(), std::make_unique<torch::optim::AdamOptions>(0.02));
    torch::optim::Adam optimizer(std::move(groups), torch::optim::AdamOptions(0.01));
    Session session(both, optimizer);
    for (int i = 0; i < 4; ++i) {
      step(with_session ? &session : nullptr, optimizer, small_pictures(i), [&](const Tensor& a) {
        const Tensor b = small_pictures(50 + i);
        return (both->back->forward(both->there->forward(a)) - a).abs().mean() +
               (both->there->forward(both->back->forward(b)) - b).abs().mean();
      });
    }
    std::vector<Tensor> values;
    for (const Tensor& parameter : both->parameters()) values.push_back(parameter.detach());
    return values;
  };
  CHECK(same_bits(train(true), train(false)));
}

}  // namespace pacer::testing::session_gan_variants
